#include "profiler/report/remedies_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/report/table.h"

namespace oomdiag {
namespace {

constexpr size_t kRemedyColumns = 50;
constexpr size_t kMostRemedies = 7;

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

/// The lines to paste and the price, under the remedy.
std::string details_of(const Remedy& remedy) {
  constexpr size_t kMostLines = 6, kColumns = 92;
  std::string text;
  for (size_t i = 0; i < std::min(remedy.how.size(), kMostLines); ++i) {
    text += "      " + printable(remedy.how[i], kColumns) + "\n";
  }
  if (remedy.how.size() > kMostLines)
    text += fmt::format("      … {} more lines: --json\n", remedy.how.size() - kMostLines);
  std::string costs = remedy.costs;
  if (remedy.changes_training) costs += costs.empty() ? "changes what is learned" : "; changes what is learned";
  if (!costs.empty()) text += "      costs: " + printable(costs, kColumns - 7) + "\n";
  return text;
}

// Whoever reads this at night wants to know how many of them to try.
std::string conclusion_on(const std::vector<Remedy>& remedies) {
  const auto count = [&](std::optional<bool> wanted) {
    return std::ranges::count_if(remedies, [&](const Remedy& one) { return fits(one) == wanted; });
  };
  const auto enough = count(true), unknown = count(std::nullopt);
  const auto all = static_cast<std::ptrdiff_t>(remedies.size());
  if (enough == all && all > 1) return "    any single one of them should be enough\n";
  if (enough > 0) return all > 1 ? "    any single one that says yes should be enough\n" : "";
  if (unknown > 0) return "    how far these go is not known, as no whole step was seen: runs would settle it\n";
  return all > 1 ? "    no single one of them is enough\n" : "    it is not enough by itself\n";
}

}  // namespace

std::string_view verdict_on(const Remedy& remedy) {
  const std::optional<bool> known = fits(remedy);
  return !known ? "unknown" : *known ? "yes" : "no";
}

std::string remedies_table(const ReportOfDevice& device, const TextOptions& options) {
  if (device.remedies.empty()) return {};
  int64_t largest = 0;
  for (const Remedy& remedy : device.remedies) largest = std::max(largest, remedy.predicted_peak_bytes);
  const Unit unit = unit_for(largest);
  const bool measured =
      std::ranges::any_of(device.remedies, [](const Remedy& one) { return one.measured_peak_bytes.has_value(); });
  const bool failed = device.failure.has_value();
  const std::string title = failed ? "what helps" : "what would lower the peak";
  std::string text = "  " + padded(fmt::format("{}, {}", title, unit.name), kRemedyColumns);
  if (measured) text += right("peak, measured", 15);
  text += right(measured ? "predicted" : "peak, predicted", measured ? 12 : 17);
  text += failed ? (measured ? "   fits\n" : "   should fit\n") : "\n";
  const size_t shown = std::min(device.remedies.size(), kMostRemedies);
  for (size_t i = 0; i < shown; ++i) {
    const Remedy& remedy = device.remedies[i];
    text += "    " + padded(printable(remedy.label, kRemedyColumns - 4), kRemedyColumns - 2);
    if (measured) text += right(remedy.measured_peak_bytes ? in_unit(*remedy.measured_peak_bytes, unit) : "-", 15);
    text += right(predicted_of(remedy, unit, options), measured ? 12 : 17);
    text += failed ? fmt::format("   {}\n", verdict_on(remedy)) : "\n";
    text += details_of(remedy);
  }
  if (device.remedies.size() > shown) text += fmt::format("    {} more: --json\n", device.remedies.size() - shown);
  return failed ? text + conclusion_on(device.remedies) : text;
}

}  // namespace oomdiag
