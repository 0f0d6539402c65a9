#include "profiler/report/text/work.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "profiler/report/report.h"
#include "profiler/report/text/table.h"
#include "profiler/report/words/place_text.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

constexpr size_t kMaxModules = 12;

std::string number_text(double number) {
  if (number >= 100) return fmt::format("{:.0f}", number);
  return number >= 10 ? fmt::format("{:.1f}", number) : fmt::format("{:.2f}", number);
}

std::string flops_text(int64_t flops) {
  const auto number = static_cast<double>(flops);
  return number >= 1e12 ? number_text(number / 1e12) + " TFLOP" : number_text(number / 1e9) + " GFLOP";
}

std::string rate_text(const Report& report, int64_t step_ns) {
  const ReportOfDevice* const device = main_device_of(report);
  if (device == nullptr || !device->batch || step_ns == 0) return {};
  return fmt::format("; {} samples/s",
                     number_text(static_cast<double>(device->batch->batch) * 1e9 / static_cast<double>(step_ns)));
}

std::string step_time_text(const Report& report, const ReportWork& work) {
  if (!work.step_time_ns) return "not known: " + work.why_no_time;
  return fmt::format("{} ms (modelled; {} to {} likely), bound by {}{}", milliseconds_text(*work.step_time_ns),
                     milliseconds_text(work.step_time_low_ns.value_or(0)),
                     milliseconds_text(work.step_time_high_ns.value_or(0)), work.bound_by,
                     rate_text(report, *work.step_time_ns));
}

/// "18.71 GB to other ranks in 98 collectives, 61 ms, of which 4 ms are behind no computation".
std::string links_text(const ReportWork& work) {
  const bool is_small = work.link_bytes < 100'000'000;
  std::string text = fmt::format("{} {} to other ranks in {} collectives",
                                 number_text(static_cast<double>(work.link_bytes) * (is_small ? 1e-6 : 1e-9)),
                                 is_small ? "MB" : "GB", work.collectives);
  if (work.communication_time_ns) {
    text += fmt::format(", {} ms, of which {} ms are hidden by no computation",
                        milliseconds_text(work.communication_time_ns),
                        milliseconds_text(work.exposed_communication_time_ns));
  }
  return text;
}

std::string row(const ReportWorkPart& part) {
  return fmt::format("    {}{:>10}{:>12}{:>12}{:>10}   {}\n", padded(printable(part.name, 36), 38),
                     milliseconds_text(part.time_ns), number_text(static_cast<double>(part.flops) * 1e-9),
                     number_text(static_cast<double>(part.memory_bytes) * 1e-9), part.launches, part.bound_by);
}

}  // namespace

std::string milliseconds_text(std::optional<int64_t> ns) {
  return ns ? number_text(static_cast<double>(*ns) * 1e-6) : "-";
}

std::string work_text(const Report& report) {
  if (!report.work) return {};
  const ReportWork& work = *report.work;
  std::string text;
  add(text, "step time", step_time_text(report, work));
  std::string sums = fmt::format("{}, {} GB of memory traffic, {} kernels in step {}", flops_text(work.flops),
                                 number_text(static_cast<double>(work.memory_bytes) * 1e-9), work.launches, work.step);
  if (work.utilization_percent) sums += fmt::format("; {} % of the GPU's peak rate", *work.utilization_percent);
  add(text, "work", sums);
  if (work.collectives > 0) add(text, "links", links_text(work));
  if (work.not_metered > 0) add(text, "", fmt::format("{} calls were not metered", work.not_metered));
  return text;
}

std::string work_table(const Report& report) {
  if (!report.work) return {};
  const ReportWork& work = *report.work;
  std::string text = fmt::format("  {}{:>10}{:>12}{:>12}{:>10}   bound by\n",
                                 padded("work of a step, by phase and module", 40), "ms", "GFLOP", "GB", "kernels");
  for (const ReportWorkPart& part : work.phases) text += row(part);
  for (size_t i = 0; i < std::min(kMaxModules, work.modules.size()); ++i) text += row(work.modules[i]);
  return text;
}

}  // namespace oomdiag
