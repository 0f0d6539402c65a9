#include "profiler/report/text/fixes_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/predict_fixes.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/report.h"
#include "profiler/report/text/table.h"
#include "profiler/report/words/place_text.h"
#include "profiler/report/words/printable.h"
#include "profiler/report/words/text_options.h"

namespace oomdiag {
namespace {

constexpr size_t kFixColumns = 50, kMaxFixColumns = 75;

/// Of the first column: width of the labels.
size_t label_columns(const std::vector<Fix>& fixes) {
  size_t columns = kFixColumns;
  for (const Fix& fix : fixes) columns = std::max(columns, printable(fix.label, 100).size() + 3);
  return std::min(columns, kMaxFixColumns);
}

/// Measured where it was run.
std::optional<bool> fits(const Fix& fix) { return fix.fits ? fix.fits : fix.predicted_fits; }

/// Before a peak that is a lower bound.
std::string_view sign_of(const Fix& fix, const TextOptions& options) {
  return !fix.at_least ? "" : options.unicode ? "≥ " : ">= ";
}

std::string predicted_of(const Fix& fix, const Unit& unit, const TextOptions& options) {
  if (fix.frees_bytes) return (options.unicode ? "− " : "- ") + in_unit(*fix.frees_bytes, unit);
  return std::string(sign_of(fix, options)) + in_unit(fix.predicted_peak_bytes, unit);
}

std::string right(const std::string& text, size_t columns) {
  const size_t width = count_columns(text);
  return std::string(width < columns ? columns - width : 0, ' ') + text;
}

/// The lines to paste, whole: half a line of code is none.
std::string lines_of(const Fix& fix, std::string_view indent) {
  constexpr size_t kMaxLineCharacters = 2000;
  std::string text;
  for (const std::string& line : fix.how) text += fmt::format("{}{}\n", indent, printable(line, kMaxLineCharacters));
  return text;
}

/// The lines to paste and the price, under the fix.
std::string details_of(const Fix& fix) {
  constexpr size_t kColumns = 92;
  std::string costs = fix.costs;
  if (fix.changes_training) costs += costs.empty() ? "changes training results" : "; changes training results";
  return lines_of(fix, "      ") + (costs.empty() ? "" : "      costs: " + printable(costs, kColumns - 7) + "\n");
}

/// Worth the line "fix": it fits, or cures the reason and is not known not to fit.
bool is_answer(const Fix& fix) { return fits(fix) == true || (cures_reason(fix.id) && !fits(fix)); }

bool in_leak(const std::vector<Fix>& fixes) {
  return std::ranges::any_of(fixes, [](const Fix& fix) { return fix.postpones_to_step.has_value(); });
}

std::vector<Fix> best_first(std::vector<Fix> fixes) {
  std::ranges::stable_sort(fixes, is_better);
  return fixes;
}

/// "yes", "no", "unknown"; in a leak, until when it helps.
std::string outlook_on(const Fix& fix) {
  if (fix.postpones_to_step) return fmt::format("postpones it to about step {}", *fix.postpones_to_step);
  return std::string(verdict_on(fix));
}

/// "11.39 GiB, fits (measured)", "frees 691.02 MiB, may fit (predicted)"
std::string peak_text(const Fix& fix, const TextOptions& options) {
  const std::optional<bool> known = fits(fix);
  const std::string_view verdict = !known ? "may fit" : *known ? "fits" : "does not fit";
  if (fix.measured_peak_bytes) return fmt::format("{}, {} (measured)", with_unit(*fix.measured_peak_bytes), verdict);
  if (fix.frees_bytes) return fmt::format("frees {}, {} (predicted)", with_unit(*fix.frees_bytes), verdict);
  return fmt::format("{}{}, {} (predicted)", sign_of(fix, options), with_unit(fix.predicted_peak_bytes), verdict);
}

// Whoever reads this at night wants to know how many of them to try.
std::string conclusion_on(const std::vector<Fix>& fixes) {
  const auto count = [&](std::optional<bool> expected) {
    return std::ranges::count_if(fixes, [&](const Fix& one) { return fits(one) == expected; });
  };
  const auto enough = count(true), unknown = count(std::nullopt);
  const auto all = static_cast<std::ptrdiff_t>(fixes.size());
  if (in_leak(fixes)) return "    memory grows in every step: only what stops that is a fix\n";
  if (enough == all && all > 1) return "    any of them should be sufficient\n";
  if (enough > 0) return all > 1 ? "    any fix marked yes should be sufficient\n" : "";
  if (unknown > 0) return "    lower bounds, as no complete step was recorded: oomdiag fix measures them\n";
  return all > 1 ? "    none of them is sufficient alone\n" : "    it is not sufficient alone\n";
}

/// The best of each group, of which a program takes one, then the others.
std::vector<Fix> one_of_each_group(const std::vector<Fix>& fixes) {
  std::set<std::string_view> groups;
  std::vector<Fix> first, others;
  for (const Fix& fix : fixes) {
    const FixRow* const row = fix.ids.empty() ? find_fix(fix.id) : nullptr;  // a combination has several
    const bool is_first = row == nullptr || groups.insert(row->group).second;
    (is_first ? first : others).push_back(fix);
  }
  first.insert(first.end(), others.begin(), others.end());
  return first;
}

}  // namespace

bool were_measured(const std::vector<Fix>& fixes) {
  return std::ranges::any_of(
      fixes, [](const Fix& fix) { return fix.fits == true || (fix.fits && fix.measured_peak_bytes.has_value()); });
}

std::string_view verdict_on(const Fix& fix) {
  const std::optional<bool> known = fits(fix);
  return !known ? "unknown" : *known ? "yes" : "no";
}

std::string best_fix_text(const Report& report, const ReportOfDevice& device, const TextOptions& options) {
  constexpr size_t kMaxLines = 3;
  if (device.fixes.empty() || !(device.failure || device.out_of_memory_near_step)) return {};
  const std::vector<Fix> fixes = best_first(device.fixes);
  const Fix& best = fixes.front();
  std::string text;
  if (!is_answer(best)) {
    const std::string folder = report.folder.empty() ? "RUN" : printable(report.folder, 200);
    add(text, "fix",
        were_measured(fixes) ? "none of those that oomdiag fix ran makes it fit"
                             : fmt::format("none is known to fit; oomdiag fix {} tries and measures them", folder));
    return text;
  }
  const bool one_line = best.how.size() == 1 && !best.how.front().starts_with('#');  // else it is not the line itself
  const std::string what = one_line ? printable(best.how.front(), 200) : printable(best.label, 200);
  add(text, "fix", fmt::format("{}   {}", what, peak_text(best, options)));
  // Lines for a reason are ways to choose from, the best first; those of other fixes are one piece of code.
  Fix shown = best;
  const bool cures_reason = device.reason && device.reason->fix == best.id;
  if (cures_reason && shown.how.size() > kMaxLines) shown.how.resize(kMaxLines);
  if (!one_line && shown.how.size() > 1 && shown.how.size() <= kMaxLines) text += lines_of(shown, "             ");
  return text;
}

std::string other_fixes_table(const ReportOfDevice& device, const TextOptions& options) {
  // The screen has so many lines: what else there is to say has some of them.
  const size_t most = 3U - (second_reason_of(device) != nullptr ? 1U : 0U) - (keeps_casts(device) ? 1U : 0U);
  std::vector<Fix> fixes = best_first(device.fixes);
  const bool failed = device.failure || device.out_of_memory_near_step;
  const bool has_best = failed && !fixes.empty() && is_answer(fixes.front());
  const bool may_fit = std::ranges::any_of(fixes, [](const Fix& fix) { return !fits(fix); });
  if (has_best) {
    fixes.erase(fixes.begin());  // it stands above
    const bool any_fits = std::ranges::any_of(fixes, [](const Fix& fix) { return fits(fix) == true; });
    if (!in_leak(fixes))
      std::erase_if(fixes, [&](const Fix& fix) { return any_fits ? fits(fix) != true : fits(fix) == false; });
  } else if (failed && may_fit) {
    std::erase_if(fixes, [](const Fix& fix) { return fits(fix).has_value(); });
  }
  if (!in_leak(fixes) && !were_measured(fixes)) fixes = one_of_each_group(fixes);
  if (fixes.size() > most) fixes.resize(most);
  if (fixes.empty()) return {};
  int64_t largest = 0;
  for (const Fix& fix : fixes) largest = std::max(largest, fix.measured_peak_bytes.value_or(fix.predicted_peak_bytes));
  const Unit unit = unit_for(largest);
  const char* const title = !failed    ? "would lower the peak"
                            : has_best ? "other fixes"
                            : may_fit  ? "may fit"
                                       : "not enough alone";
  const size_t columns = label_columns(fixes);
  std::string text = "  " + padded(fmt::format("{}, {}", title, unit.name), columns) + right("peak", 10) +
                     (failed ? "   fits\n" : "\n");
  for (const Fix& fix : fixes) {
    const std::string peak =
        fix.measured_peak_bytes ? in_unit(*fix.measured_peak_bytes, unit) : predicted_of(fix, unit, options);
    text += "    " + padded(printable(fix.label, 100), columns - 2) + right(peak, 10);
    text += failed ? fmt::format("   {}\n", outlook_on(fix)) : "\n";
  }
  return text;
}

std::string fixes_table(const ReportOfDevice& device, const TextOptions& options) {
  if (device.fixes.empty()) return {};
  const std::vector<Fix> fixes = best_first(device.fixes);
  int64_t largest = 0;
  for (const Fix& fix : fixes) largest = std::max(largest, fix.predicted_peak_bytes);
  const Unit unit = unit_for(largest);
  const bool measured =
      std::ranges::any_of(device.fixes, [](const Fix& one) { return one.measured_peak_bytes.has_value(); });
  const bool failed = device.failure || device.out_of_memory_near_step;
  const std::string title = failed ? "fixes" : "would lower the peak";
  const size_t columns = label_columns(fixes);
  std::string text = "  " + padded(fmt::format("{}, {}", title, unit.name), columns);
  if (measured) text += right("peak, measured", 15);
  text += right(measured ? "predicted" : "peak, predicted", measured ? 12 : 17);
  text += failed ? (measured ? "   fits\n" : "   should fit\n") : "\n";
  for (const Fix& fix : fixes) {
    text += "    " + padded(printable(fix.label, 100), columns - 2);
    if (measured) text += right(fix.measured_peak_bytes ? in_unit(*fix.measured_peak_bytes, unit) : "-", 15);
    text += right(predicted_of(fix, unit, options), measured ? 12 : 17);
    text += failed ? fmt::format("   {}\n", outlook_on(fix)) : "\n";
    text += details_of(fix);
  }
  return failed ? text + conclusion_on(device.fixes) : text;
}

}  // namespace oomdiag
