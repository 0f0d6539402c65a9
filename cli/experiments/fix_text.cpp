#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/device/device.h"
#include "cli/experiments/fix.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/sizes.h"
#include "profiler/cost/time_model.h"
#include "profiler/counted.h"
#include "profiler/report/text/table.h"
#include "profiler/report/text/work.h"
#include "profiler/report/words/cause_text.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {

namespace {

constexpr std::size_t kLabelColumns = 42;
constexpr std::size_t kMaxLabel = 100, kMaxLine = 200;

/// What the meter counted, times the steps that take as many samples as one did.
std::optional<int64_t> for_as_many_samples(const std::optional<int64_t>& of_step, double steps) {
  if (!of_step) return std::nullopt;
  return std::llround(steps * static_cast<double>(*of_step));
}

/// "+33 %", by what the meter counted; of a run that was not metered by the modules that run again.
std::string extra_flops(const MeasuredFix& fix, const StepCost& before, double steps) {
  const bool is_counted = fix.step.flops && before.flops.value_or(0) > 0;
  if (!is_counted) return fix.extra_forward() > 0 ? fmt::format("+{:.0f} % fw", 100 * fix.extra_forward()) : "-";
  const double extra = steps * static_cast<double>(*fix.step.flops) / static_cast<double>(*before.flops) - 1;
  return std::abs(extra) < 0.0005 ? "none" : fmt::format("{:+.{}f} %", 100 * extra, std::abs(extra) < 0.1 ? 1 : 0);
}

std::string predicted_text(const MeasuredFix& fix) {
  return (fix.predicted_at_least() ? "≥ " : "") + to_gib(fix.predicted_peak_bytes());
}

std::string row(const MeasuredFix& fix, const StepCost& before, std::optional<int64_t> batch) {
  const double steps = fix.steps_for_one(before, batch);
  return fmt::format("    {} {:>9} {:>9} {:>9}   {:<5} {:>9}  {:>8}   {}\n",
                     padded(printable(fix.label(), kLabelColumns), kLabelColumns), predicted_text(fix),
                     to_gib(fix.measured_peak_bytes), to_gib(fix.measured_reserved_bytes),
                     fix.fits ? (fix.still_grows ? "grows" : "yes") : "no",
                     milliseconds_text(for_as_many_samples(fix.step.time_ns, steps)), extra_flops(fix, before, steps),
                     fix.changes_numerics() ? "changed" : "same");
}

std::string headline_of_what_fits(const Before& before, const std::string& gpu) {
  if (before.grows) return fmt::format("oomdiag: it fits on {}, and grows from step to step: change the code\n", gpu);
  if (before.stopped_at_step == 0) return fmt::format("oomdiag: it fits on {}: there is nothing to fix\n", gpu);
  return fmt::format("oomdiag: it fits on {} as far as it was run, until its peak was steady in step {}\n", gpu,
                     before.stopped_at_step);
}

/// Which run the figures are of.
std::string extent_of(const Before& before) {
  if (before.outcome != "ok" && !before.is_whole) return "at least: no whole run could be seen";
  if (before.stopped_at_step == 0) return "measured: a whole run";
  return fmt::format("measured: a run until its peak was steady in step {}", before.stopped_at_step);
}

std::string headline(const Fixed& fixed, const Target& target) {
  const std::string gpu = describe(target.device);
  const Before& before = fixed.before;
  if (before.outcome == "ok") return headline_of_what_fits(before, gpu);
  const auto fitting =
      std::count_if(fixed.fixes.begin(), fixed.fixes.end(), [](const MeasuredFix& one) { return one.helps(); });
  if (before.grows && fitting == 0) {
    return fmt::format("oomdiag: on {} it grows from step to step: change the code\n", gpu);
  }
  const std::string found = fitting == 0
                                ? "nothing that was tried makes it fit"
                                : fmt::format("{} {} it fit", fitting, fitting == 1 ? "fix makes" : "fixes make");
  return fmt::format("oomdiag: {} on {}\n", found, gpu);
}

std::string table(const Fixed& fixed, const Target& target) {
  std::string text =
      fmt::format("\n  {} {:>9} {:>9} {:>9}   {:<5} {:>9}  {:>8}   {}\n", padded("fixes, GiB", kLabelColumns + 2),
                  "predicted", "measured", "reserved", "fits", "time, ms", "FLOPs", "numerics");
  bool any = false;
  for (const MeasuredFix& fix : fixed.fixes) {
    if (!fix.unproved.empty()) continue;
    text += row(fix, fixed.before.step, target.batch);
    any = true;
  }
  return any ? text : "";
}

std::string unproved(const Fixed& fixed) {
  std::string text;
  for (const MeasuredFix& fix : fixed.fixes) {
    if (fix.unproved.empty()) continue;
    const std::string predicted =
        fix.predicted_peak_bytes() ? fmt::format(", {} GiB predicted", predicted_text(fix)) : "";
    text += fmt::format("    {}{}: {}\n", printable(fix.label(), kMaxLabel), predicted, printable(fix.unproved, 120));
    for (const std::string& line : fix.lines) text += "      " + printable(line, kMaxLine) + "\n";
  }
  return text.empty() ? text : "\n  not proved\n" + text;
}

std::string lines_to_write(const Fixed& fixed) {
  std::string text;
  for (const MeasuredFix& fix : fixed.fixes) {
    const bool says_it = fix.lines.size() == 1 && fix.lines.front() == fix.label();  // "--batch 128"
    if (!fix.helps() || fix.lines.empty() || says_it) continue;
    text += fmt::format("\n  {}, as you would write it\n", fix.label());
    for (const std::string& line : fix.lines) text += "    " + printable(line, kMaxLine) + "\n";
  }
  return text;
}

}  // namespace

std::string to_text(const Fixed& fixed, const Target& target, const std::string& command) {
  const Before& before = fixed.before;
  std::string text = headline(fixed, target) + "\n";
  const int64_t cached = before.reserved_bytes - before.allocated_bytes;
  text += fmt::format("  required GPU memory  {} ({}): {} GiB allocated, {} GiB reserved at most\n",
                      required_range(before.required_bytes, cached), extent_of(before), to_gib(before.allocated_bytes),
                      to_gib(before.reserved_bytes));
  if (before.outcome != "ok") {
    text += fmt::format("  runs out in {}; PyTorch may take {} GiB of the GPU\n", before.place,
                        to_gib(before.available_bytes));
  }
  if (before.step.time_ns) {
    const ErrorOfModel error = error_of_model();
    const auto times = [&](double share) {
      return static_cast<int64_t>(share * static_cast<double>(*before.step.time_ns));
    };
    text += fmt::format("  step time  {} ms as it is (modelled; {} to {} likely); below that of as many samples\n",
                        milliseconds_text(before.step.time_ns), milliseconds_text(times(error.low)),
                        milliseconds_text(times(error.high)));
  }
  for (const std::string& change : before.code_changes) text += fmt::format("  change   {}\n", printable(change, 200));
  text += table(fixed, target) + unproved(fixed) + lines_to_write(fixed);
  text += fmt::format("\n  {}, {:.0f} s; sizes are measured but for the predicted ones, times are modelled{}\n",
                      counted(fixed.runs, "run"), fixed.seconds,
                      target.proves_on_real ? ": what fits on the GPU, the rest on a virtual one like it" : "");
  if (!command.empty() && before.outcome != "ok") text += fmt::format("\n  program: {}\n", printable(command, 200));
  return text;
}

std::string to_json(const Fixed& fixed, const Target& target, const std::string& command) {
  using Json = nlohmann::ordered_json;
  const auto difference = [](const std::optional<int64_t>& after, const std::optional<int64_t>& of_before) {
    return after && of_before ? Json(*after - *of_before) : Json(nullptr);
  };
  const Before& before = fixed.before;
  Json json = {{"schema", "oomdiag-fix/1"}, {"command", command}, {"device", describe(target.device)}};
  json["before"] = {{"outcome", before.outcome},
                    {"place", before.place},
                    {"cause", before.cause},
                    {"required_bytes", before.required_bytes},
                    {"peak_allocated_bytes", before.allocated_bytes},
                    {"peak_reserved_bytes", before.reserved_bytes},
                    {"available_bytes", before.available_bytes},
                    {"step_flops", optional_json(before.step.flops)},
                    {"step_bus_bytes", optional_json(before.step.bus_bytes)},
                    {"step_time_ns", optional_json(before.step.time_ns)},
                    {"whole_run", before.is_whole && before.stopped_at_step == 0},
                    {"stopped_at_step", before.stopped_at_step},
                    {"grows", before.grows},
                    {"code_changes", before.code_changes}};
  json["fixes"] = Json::array();
  for (const MeasuredFix& fix : fixed.fixes) {
    const double steps = fix.steps_for_one(before.step, target.batch);
    Json ids = Json::array();
    for (const Change& change : fix.changes) ids.push_back(change.id);
    json["fixes"].push_back(
        {{"ids", ids},
         {"label", fix.label()},
         {"predicted_peak_bytes", optional_json(fix.predicted_peak_bytes())},
         {"predicted_at_least", fix.predicted_at_least()},
         {"measured_peak_bytes", optional_json(fix.measured_peak_bytes)},
         {"measured_reserved_bytes", optional_json(fix.measured_reserved_bytes)},
         {"step_flops", optional_json(fix.step.flops)},
         {"steps_for_one", steps},
         {"extra_flops", difference(for_as_many_samples(fix.step.flops, steps), before.step.flops)},
         {"extra_bus_bytes", difference(for_as_many_samples(fix.step.bus_bytes, steps), before.step.bus_bytes)},
         {"step_time_ns", optional_json(fix.step.time_ns)},
         {"slowdown", optional_json(fix.slowdown(before.step, target.batch))},
         {"fits", fix.unproved.empty() ? Json(fix.fits) : Json(nullptr)},
         {"still_grows", fix.still_grows},
         {"extra_forward", fix.extra_forward()},
         {"recomputed_ops", optional_json(fix.recomputed_ops())},
         {"changes_numerics", fix.changes_numerics()},
         {"how", fix.lines},
         {"unproved", text_or_null(fix.unproved)}});
  }
  json["interrupted"] = fixed.interrupted_by != 0;
  json["runs"] = fixed.runs;
  json["seconds"] = fixed.seconds;
  return oomdiag::to_text(json);
}

}  // namespace oomdiag
