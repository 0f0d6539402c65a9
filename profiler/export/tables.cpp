#include "profiler/export/tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string_view>

#include "profiler/explain/findings.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/export/picture.h"
#include "profiler/replay/history.h"
#include "profiler/report/make/holders.h"
#include "profiler/report/report.h"
#include "profiler/report/text/fixes_table.h"
#include "profiler/report/text/holders_table.h"
#include "profiler/report/text/text.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

void fold(const OwnerNode& node, const std::string& above, std::string& text) {
  std::string name = printable(node.name, 200);
  std::ranges::replace(name, ';', ',');
  const std::string path = above.empty() ? name : above + ";" + name;
  int64_t own = node.bytes;
  for (const OwnerNode& child : node.children) {
    own -= child.bytes;
    fold(child, path, text);
  }
  if (own > 0) text += fmt::format("{} {}\n", path, own);
}

// A spreadsheet takes a cell that begins so for a formula, and may run it.
bool is_formula(std::string_view text) {
  return !text.empty() && std::string_view("=+-@\t\r").find(text.front()) != text.npos;
}

std::string csv_row(int gpu, const ReportHolder& holder) {
  return fmt::format("{},{},{},{},{},{},{},{},{},{},{}\r\n", gpu, name_of(holder.category), csv_cell(holder.name),
                     csv_cell(holder.op), csv_cell(holder.source), csv_cell(holder.shape), csv_cell(holder.used_by),
                     holder.bytes, holder.blocks, holder.copies, csv_cell(holder.referrer));
}

constexpr size_t kColumnsOfCell = 60;

/// In a table of Markdown nothing may end a cell, a line or begin markup.
std::string cell(std::string_view text, size_t columns = kColumnsOfCell) {
  std::string safe;
  for (const char c : printable(text, columns)) {
    if (std::string_view("|`*_<>[]\\").find(c) != std::string_view::npos) safe += '\\';
    safe += c;
  }
  return safe;
}

void add_holders(const ReportOfDevice& device, std::string& text) {
  constexpr size_t kMaxHolders = 8;
  std::vector<const ReportHolder*> holders;
  for (const ReportHolder& holder : device.top_allocations) holders.push_back(&holder);
  std::ranges::stable_sort(holders, std::greater{}, [](const ReportHolder* one) { return one->bytes; });
  if (holders.size() > kMaxHolders) holders.resize(kMaxHolders);
  text += "\n| GPU memory | what | |\n|---|---|---:|\n";
  int64_t rest = device.memory.allocated_bytes;
  for (const ReportHolder* holder : holders) {
    text += fmt::format("| {} | {} | {} |\n", cell(label_of(holder->category)),
                        cell(label_of(*holder, {}, kColumnsOfCell)), with_unit(holder->bytes));
    rest -= holder->bytes;
  }
  if (rest > 0) text += fmt::format("| others | | {} |\n", with_unit(rest));
}

void add_fixes(const ReportOfDevice& device, std::string& text) {
  constexpr size_t kMaxFixes = 6;
  if (device.fixes.empty()) return;
  text += "\n| fix | peak | fits |\n|---|---:|---|\n";
  for (size_t i = 0; i < std::min(device.fixes.size(), kMaxFixes); ++i) {
    const Fix& fix = device.fixes[i];
    const int64_t peak = fix.measured_peak_bytes.value_or(fix.predicted_peak_bytes);
    const bool frees = fix.frees_bytes && !fix.measured_peak_bytes;
    const char* const how = fix.measured_peak_bytes ? "measured"
                            : frees                 ? "frees"
                            : fix.at_least          ? "at least"
                                                    : "predicted";
    text += fmt::format("| {} | {} {} | {} |\n", cell(fix.label), how, with_unit(frees ? *fix.frees_bytes : peak),
                        verdict_on(fix));
  }
}

std::string_view trimmed(std::string_view text) {
  const size_t begin = std::min(text.find_first_not_of(' '), text.size());
  return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

// The headline and the first paragraph are those of the report as text: "  where    relu1".
void add_words(std::string_view words, std::string& text) {
  constexpr size_t kMaxFacts = 10, kLabel = 2, kValue = 13;
  const size_t head = std::min(words.find('\n'), words.size());
  const size_t gpu = std::min(words.find("  "), head);
  text =
      fmt::format("### {} · {}\n\n", cell(words.substr(0, gpu), 80), cell(trimmed(words.substr(gpu, head - gpu)), 80));
  words.remove_prefix(std::min(head + 2, words.size()));
  words = words.substr(0, words.find("\n\n"));
  for (size_t facts = 0; facts < kMaxFacts && !words.empty(); ++facts) {
    const std::string_view line = words.substr(0, words.find('\n'));
    words.remove_prefix(std::min(line.size() + 1, words.size()));
    if (line.size() <= kValue) continue;
    text += fmt::format("- **{}** {}\n", cell(trimmed(line.substr(kLabel, kValue - kLabel))),
                        cell(line.substr(kValue), 200));
  }
}

}  // namespace

std::string csv_cell(std::string_view text) {
  const bool formula = is_formula(text);
  if (!formula && text.find_first_of(",\"\r\n") == text.npos) return std::string(text);
  std::string safe = formula ? "\"'" : "\"";
  for (const char c : text) safe += c == '"' ? std::string("\"\"") : std::string(1, c);
  return safe + "\"";
}

std::string to_folded(const OwnerNode& owners) {
  std::string text;
  for (const OwnerNode& child : owners.children) fold(child, "", text);
  return text;
}

std::string to_csv(const Report& report) {
  std::string text = "GPU,category,name,op,source,shape,used_by,bytes,blocks,copies,referrer\r\n";
  for (const ReportOfDevice& device : report.devices) {
    for (const ReportHolder& holder : device.top_allocations) text += csv_row(device.device.index, holder);
    for (const ReportHolder& others : list_others(device)) text += csv_row(device.device.index, others);
  }
  return text;
}

std::string to_markdown(const Report& report) {
  std::string text;
  add_words(to_text(report, {.unicode = true, .all = true}), text);
  if (const ReportOfDevice* const device = main_device_of(report)) {
    add_holders(*device, text);
    add_fixes(*device, text);
  }
  if (!report.limitations.empty()) {
    text += fmt::format(
        "\n{} not known to this report; made by oomdiag\n",
        report.limitations.size() == 1 ? "1 thing is" : fmt::format("{} things are", report.limitations.size()));
  }
  return text;
}

}  // namespace oomdiag
