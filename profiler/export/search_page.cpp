#include "profiler/export/search_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/export/embed.h"
#include "profiler/report/words/markup.h"

OOMDIAG_EMBED(search_page, OOMDIAG_PAGE_FOLDER "/search.html");
OOMDIAG_EMBEDDED(style);

namespace oomdiag {
namespace {

std::string cell(const std::optional<int64_t>& bytes) {
  return fmt::format(R"(<td class="number">{}</td>)", bytes ? with_unit(*bytes) : "");
}

double percent(int64_t bytes, int64_t whole) {
  return whole > 0 ? 100.0 * static_cast<double>(std::clamp<int64_t>(bytes, 0, whole)) / static_cast<double>(whole) : 0;
}

std::string bar_cell(const SearchRow& row, int64_t widest) {
  if (!row.measured_bytes) return "<td></td>";
  std::string bar = fmt::format(R"(<i class="{}" style="width:{:.2f}%"></i>)", row.fits.value_or(false) ? "fits" : "",
                                percent(*row.measured_bytes, widest));
  if (row.available_bytes > 0)
    bar += fmt::format(R"(<b style="left:{:.2f}%"></b>)", percent(row.available_bytes, widest));
  return fmt::format(R"(<td class="wide"><div class="bar" aria-hidden="true">{}</div></td>)", bar);
}

std::string row_of(const SearchRow& row, int64_t widest, bool has_predicted) {
  std::string text = fmt::format("<tr><td>{}", escape_markup(row.label));
  std::string lines;
  for (const std::string& line : row.lines) lines += (lines.empty() ? "" : "\n") + escape_markup(line);
  if (!lines.empty()) text += "<pre tabindex=\"0\">" + lines + "</pre>";
  text += "</td>" + bar_cell(row, widest) + cell(row.measured_bytes) + cell(row.reserved_bytes);
  if (has_predicted) text += cell(row.predicted_bytes);
  const std::string_view fits = !row.fits ? "" : *row.fits ? "yes" : "no";
  return text +
         fmt::format("<td class=\"{}\">{}</td><td><small>{}</small></td></tr>\n", fits, fits, escape_markup(row.note));
}

std::string header_of(const SearchPage& page, std::string_view headline) {
  return fmt::format("<header{}>\n  <h1>{}</h1>\n  <p id=\"gpu\">{}</p>\n</header>",
                     page.found ? "" : " class=\"failed\"", escape_markup(headline), escape_markup(page.program));
}

std::string picture_of(const SearchPage& page) {
  const SearchPicture& picture = page.picture;
  if (picture.svg.empty()) return {};
  return fmt::format(
      "<section aria-labelledby=\"picture\">\n<h2 id=\"picture\">{}</h2>\n<p class=\"note\">{}</p>\n{}\n</section>",
      escape_markup(picture.heading), escape_markup(picture.note), picture.svg);
}

/// The first line of the text, without our name.
std::string headline_of(const std::string& text) {
  constexpr std::string_view kName = "oomdiag: ";
  std::string headline = text.substr(0, text.find('\n'));
  if (headline.starts_with(kName)) headline.erase(0, kName.size());
  if (!headline.empty() && headline[0] >= 'a' && headline[0] <= 'z') headline[0] = static_cast<char>(headline[0] - 32);
  return headline;
}

}  // namespace

std::string to_html(const SearchPage& page) {
  int64_t widest = 0;
  for (const SearchRow& row : page.rows)
    widest = std::max({widest, row.measured_bytes.value_or(0), row.available_bytes});
  const bool has_predicted = std::ranges::any_of(page.rows, [](const SearchRow& row) { return !!row.predicted_bytes; });
  std::string rows;
  for (const SearchRow& row : page.rows) rows += row_of(row, widest, has_predicted);
  const std::string headline = headline_of(page.text);
  return fill_in({oomdiag_search_page, oomdiag_search_page_end},
                 {{"/*STYLE*/", {oomdiag_style, oomdiag_style_end}},
                  {"<!--PREDICTED-->", has_predicted ? R"(<th class="number">predicted</th>)" : ""},
                  {"<!--TITLE-->", escape_markup("oomdiag: " + headline)},
                  {"<!--TEXT-->", escape_markup(page.text)},
                  {"<!--ROWS-->", rows},
                  {"<!--PICTURE-->", picture_of(page)},
                  {"<!--HEADER-->", header_of(page, headline)}});
}

}  // namespace oomdiag
