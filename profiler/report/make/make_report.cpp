#include "profiler/report/make/make_report.h"

#include <algorithm>

#include "profiler/explain/explain.h"
#include "profiler/explain/facts/imbalance.h"
#include "profiler/explain/findings.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"
#include "profiler/replay/replay.h"
#include "profiler/report/make/device_reads.h"
#include "profiler/report/make/gpu_report.h"
#include "profiler/report/make/limitations.h"
#include "profiler/report/report.h"
#include "profiler/trace/format.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

// An exit status overrules what the events look like: a program that ended well survived all its OOMs.
std::optional<bool> has_survived(const ReportInputs& inputs) {
  if (inputs.signal) return false;
  if (inputs.exit_code) return *inputs.exit_code == 0;
  return std::nullopt;
}

std::string find_outcome(const Trace& trace, const History& history, const ReportInputs& inputs) {
  const auto failed = [](const DeviceHistory& device) { return device.failure.has_value(); };
  if (std::any_of(history.devices.begin(), history.devices.end(), failed)) return "out_of_memory";
  if (inputs.signal) return "killed";
  const bool ended_well = trace.process.end_state != EndState::running;  // not so by os._exit(0), or os.exec…
  const bool went_on = inputs.exit_code ? *inputs.exit_code == 0 : ended_well;
  if (went_on && std::any_of(history.devices.begin(), history.devices.end(), has_caught)) return "caught";
  if (inputs.exit_code) return *inputs.exit_code == 0 ? "ok" : *inputs.exit_code > 128 ? "killed" : "failed";
  return trace.process.end_state == EndState::running && !inputs.still_runs ? "killed" : "ok";
}

size_t find_main_device(const History& history) {
  const auto less = [](const DeviceHistory& a, const DeviceHistory& b) {
    if (a.failure.has_value() != b.failure.has_value()) return b.failure.has_value();
    return a.peak.reserved_bytes < b.peak.reserved_bytes;
  };
  const auto most = std::max_element(history.devices.begin(), history.devices.end(), less);
  return static_cast<size_t>(most - history.devices.begin());
}

// A snapshot does not record the device that it was taken on.
bool is_total_known(const Trace& trace, int device) {
  return !trace.process.snapshot || !find_gpu(trace, device).name.empty();
}

}  // namespace

Report make_report(const Trace& trace, const ReportInputs& inputs) {
  History history;
  return make_report(trace, inputs, history);
}

Report make_report(const Trace& trace, const ReportInputs& inputs, History& history) {
  history = replay(trace, has_survived(inputs));

  Report report{.outcome = find_outcome(trace, history, inputs),
                .exit_code = inputs.signal ? 128 + *inputs.signal : inputs.exit_code,
                .torch = trace.process.torch_version,
                .command = trace.process.command,
                .folder = inputs.folder,
                .snapshot = trace.process.snapshot,
                .rank = trace.process.rank,
                .world_size = trace.process.world_size,
                .steps = history.steps,
                .steady_steps = trace.process.steady_steps,
                .still_runs = inputs.still_runs,
                .lower_bound = depends_on_data(history.reads),
                .unwatched = trace.process.unwatched,
                .main_device = find_main_device(history)};
  for (size_t i = 0; i < history.devices.size(); ++i) {
    const DeviceHistory& device = history.devices[i];
    Device judged = find_gpu(trace, device.index);
    if (inputs.judged_bytes > 0) judged.total_bytes = inputs.judged_bytes;
    const Findings findings = explain(device, {.settings = history.settings,
                                               .device = judged,
                                               .batch = inputs.batch,
                                               .total_is_known = is_total_known(trace, device.index),
                                               .imbalance = compare_devices(history.devices, i)});
    report.devices.push_back(report_device(trace, device, findings));
    ReportDevice& gpu = report.devices.back().device;
    const double fraction = history.settings.memory_fraction;
    if (fraction < 1) gpu.allowed_bytes = allowed_bytes(gpu.total_bytes, fraction);
  }
  report.limitations = list_limitations(trace, history, inputs);
  report.notes = history.notes;
  return report;
}

}  // namespace oomdiag
