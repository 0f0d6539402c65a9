#include "profiler/report/remedies_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/explain/predict_fixes.h"
#include "profiler/report/place_text.h"
#include "profiler/report/table.h"

namespace oomdiag {
namespace {

constexpr size_t kRemedyColumns = 50;

/// Measured where it was run.
std::optional<bool> fits(const Remedy& remedy) { return remedy.fits ? remedy.fits : remedy.predicted_fits; }

std::string predicted_of(const Remedy& remedy, const Unit& unit, const TextOptions& options) {
  const std::string_view sign = !remedy.at_least ? "" : options.unicode ? "≥ " : ">= ";
  return std::string(sign) + in_unit(remedy.predicted_peak_bytes, unit);
}

std::string right(const std::string& text, size_t columns) {
  const size_t width = count_columns(text);
  return std::string(width < columns ? columns - width : 0, ' ') + text;
}

/// The lines to paste, whole: half a line of code is none.
std::string lines_of(const Remedy& remedy, std::string_view indent) {
  constexpr size_t kMostCharacters = 2000;
  std::string text;
  for (const std::string& line : remedy.how) text += fmt::format("{}{}\n", indent, printable(line, kMostCharacters));
  return text;
}

/// The lines to paste and the price, under the fix.
std::string details_of(const Remedy& remedy) {
  constexpr size_t kColumns = 92;
  std::string costs = remedy.costs;
  if (remedy.changes_training) costs += costs.empty() ? "changes training results" : "; changes training results";
  return lines_of(remedy, "      ") + (costs.empty() ? "" : "      costs: " + printable(costs, kColumns - 7) + "\n");
}

bool in_leak(const std::vector<Remedy>& fixes) {
  return std::ranges::any_of(fixes, [](const Remedy& fix) { return fix.postpones_to_step.has_value(); });
}

std::vector<Remedy> best_first(std::vector<Remedy> fixes) {
  std::ranges::stable_sort(fixes, is_better);
  return fixes;
}

/// "yes", "no", "unknown"; in a leak, until when it helps.
std::string outlook_on(const Remedy& fix) {
  if (fix.postpones_to_step) return fmt::format("postpones it to about step {}", *fix.postpones_to_step);
  return std::string(verdict_on(fix));
}

/// "11.39 GiB, fits (measured)"
std::string peak_text(const Remedy& fix, const TextOptions& options) {
  const int64_t peak = fix.measured_peak_bytes.value_or(fix.predicted_peak_bytes);
  const bool bound = fix.at_least && !fix.measured_peak_bytes;
  const std::optional<bool> known = fits(fix);
  return fmt::format("{}{}, {} ({})",
                     !bound            ? ""
                     : options.unicode ? "≥ "
                                       : ">= ",
                     with_unit(peak),
                     !known   ? "may fit"
                     : *known ? "fits"
                              : "does not fit",
                     fix.measured_peak_bytes ? "measured" : "predicted");
}

// Whoever reads this at night wants to know how many of them to try.
std::string conclusion_on(const std::vector<Remedy>& remedies) {
  const auto count = [&](std::optional<bool> wanted) {
    return std::ranges::count_if(remedies, [&](const Remedy& one) { return fits(one) == wanted; });
  };
  const auto enough = count(true), unknown = count(std::nullopt);
  const auto all = static_cast<std::ptrdiff_t>(remedies.size());
  if (in_leak(remedies)) return "    memory grows in every step: only what stops that is a fix\n";
  if (enough == all && all > 1) return "    any of them should be sufficient\n";
  if (enough > 0) return all > 1 ? "    any fix marked yes should be sufficient\n" : "";
  if (unknown > 0) return "    lower bounds, as no complete step was recorded: oomdiag fix measures them\n";
  return all > 1 ? "    none of them is sufficient alone\n" : "    it is not sufficient alone\n";
}

}  // namespace

std::string_view verdict_on(const Remedy& remedy) {
  const std::optional<bool> known = fits(remedy);
  return !known ? "unknown" : *known ? "yes" : "no";
}

std::string best_fix_text(const Report& report, const ReportOfDevice& device, const TextOptions& options) {
  constexpr size_t kMostLines = 3;
  if (device.remedies.empty() || !(device.failure || device.out_of_memory_near_step)) return {};
  const std::vector<Remedy> fixes = best_first(device.remedies);
  const Remedy& best = fixes.front();
  std::string text;
  if (fits(best) != true) {
    const std::string folder = report.folder.empty() ? "RUN" : printable(report.folder, 200);
    add(text, "fix", fmt::format("none is known to fit; oomdiag fix {} tries and measures them", folder));
    return text;
  }
  const bool one_line = best.how.size() == 1 && !best.how.front().starts_with('#');  // else it is not the line itself
  const std::string what = one_line ? printable(best.how.front(), 200) : printable(best.label, 200);
  add(text, "fix", fmt::format("{}   {}", what, peak_text(best, options)));
  if (!one_line && best.how.size() > 1 && best.how.size() <= kMostLines) text += lines_of(best, "             ");
  return text;
}

std::string other_fixes_table(const ReportOfDevice& device, const TextOptions& options) {
  constexpr size_t kMost = 3;
  std::vector<Remedy> fixes = best_first(device.remedies);
  const bool failed = device.failure || device.out_of_memory_near_step;
  const bool has_best = failed && !fixes.empty() && fits(fixes.front()) == true;
  const bool may_fit = std::ranges::any_of(fixes, [](const Remedy& fix) { return !fits(fix); });
  if (has_best) {
    fixes.erase(fixes.begin());  // it stands above
    if (!in_leak(fixes)) std::erase_if(fixes, [](const Remedy& fix) { return fits(fix) != true; });
  } else if (failed && may_fit) {
    std::erase_if(fixes, [](const Remedy& fix) { return fits(fix).has_value(); });
  }
  if (fixes.size() > kMost) fixes.resize(kMost);
  if (fixes.empty()) return {};
  int64_t largest = 0;
  for (const Remedy& fix : fixes)
    largest = std::max(largest, fix.measured_peak_bytes.value_or(fix.predicted_peak_bytes));
  const Unit unit = unit_for(largest);
  const char* const title = !failed    ? "would lower the peak"
                            : has_best ? "other fixes"
                            : may_fit  ? "may fit"
                                       : "not enough alone";
  std::string text = "  " + padded(fmt::format("{}, {}", title, unit.name), kRemedyColumns) + right("peak", 10) +
                     (failed ? "   fits\n" : "\n");
  for (const Remedy& fix : fixes) {
    const std::string peak =
        fix.measured_peak_bytes ? in_unit(*fix.measured_peak_bytes, unit) : predicted_of(fix, unit, options);
    text += "    " + padded(printable(fix.label, 100), kRemedyColumns - 2) + right(peak, 10);
    text += failed ? fmt::format("   {}\n", outlook_on(fix)) : "\n";
  }
  return text;
}

std::string remedies_table(const ReportOfDevice& device, const TextOptions& options) {
  if (device.remedies.empty()) return {};
  const std::vector<Remedy> fixes = best_first(device.remedies);
  int64_t largest = 0;
  for (const Remedy& remedy : fixes) largest = std::max(largest, remedy.predicted_peak_bytes);
  const Unit unit = unit_for(largest);
  const bool measured =
      std::ranges::any_of(device.remedies, [](const Remedy& one) { return one.measured_peak_bytes.has_value(); });
  const bool failed = device.failure || device.out_of_memory_near_step;
  const std::string title = failed ? "fixes" : "would lower the peak";
  std::string text = "  " + padded(fmt::format("{}, {}", title, unit.name), kRemedyColumns);
  if (measured) text += right("peak, measured", 15);
  text += right(measured ? "predicted" : "peak, predicted", measured ? 12 : 17);
  text += failed ? (measured ? "   fits\n" : "   should fit\n") : "\n";
  for (const Remedy& remedy : fixes) {
    text += "    " + padded(printable(remedy.label, 100), kRemedyColumns - 2);
    if (measured) text += right(remedy.measured_peak_bytes ? in_unit(*remedy.measured_peak_bytes, unit) : "-", 15);
    text += right(predicted_of(remedy, unit, options), measured ? 12 : 17);
    text += failed ? fmt::format("   {}\n", outlook_on(remedy)) : "\n";
    text += details_of(remedy);
  }
  return failed ? text + conclusion_on(device.remedies) : text;
}

}  // namespace oomdiag
