#include "cli/experiments/complete.h"

#include <algorithm>
#include <utility>

#include "cli/device/device.h"
#include "cli/experiments/executor.h"
#include "cli/experiments/fix.h"
#include "cli/launch/diagnosis.h"
#include "cli/launch/steady.h"
#include "cli/process/temporary_folder.h"
#include "cli/process/workers.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "profiler/explain/batch.h"
#include "profiler/explain/causes/causes.h"
#include "profiler/explain/findings.h"
#include "profiler/replay/history.h"
#include "profiler/report/make/whole_run.h"
#include "profiler/report/report.h"

namespace oomdiag {
namespace {

/// The report on a run of which nothing is left; nullopt where there is none.
std::optional<Report> run_for_report(DiagnosisRequest request, const Install& install) {
  const TemporaryFolder folder;
  request.base = folder.path();
  request.keeps_output = true;
  request.shows_progress = false;
  Executor executor(install);
  const Executed executed = executor.run({request}, [](std::size_t) {}).front();
  return executed.has_report() ? std::optional(load_report(executed.folder / "report.json")) : std::nullopt;
}

// A run with ample memory says nothing of fragmentation. Its one fix is an environment variable: it is tried, beyond the
// step that failed.
void try_expandable_segments(Report& failed, DiagnosisRequest request, uint32_t step, const Install& install) {
  ReportOfDevice& device = *main_device_of(failed);
  const auto fix = std::find_if(device.fixes.begin(), device.fixes.end(),
                                [](const Fix& one) { return one.id == "expandable_segments"; });
  if (fix == device.fixes.end() || !device.cause || device.cause->kind != CauseKind::fragmentation) return;
  request.steady = until_step(step);
  for (const auto& variable : expandable_segments().environment) request.environment.push_back(variable);
  const std::optional<Report> tried = run_for_report(std::move(request), install);
  const ReportOfDevice* const device_tried = tried ? main_device_of(*tried) : nullptr;
  if (device_tried == nullptr) return;
  const bool passed = tried->outcome == "ok";
  if (!passed && tried->outcome != "out_of_memory") return;
  fix->fits = passed;
  if (passed) fix->measured_peak_bytes = device_tried->peak.allocated_bytes;
}

void take_complete_run(Diagnosis& failed, const VirtualHost& host, const DiagnosisRequest& request,
                       const Install& install) {
  for (const ReportOfDevice& device : failed.report->devices) {
    if (device.cause && device.cause->kind == CauseKind::leak) return;  // what grows without end has no whole run
  }
  const uint32_t step = std::max<uint32_t>(1, step_to_reach(*failed.report));
  DiagnosisRequest again = request;
  again.device = {.device = with_ample_memory(host)};
  again.judged_bytes = host.bytes_of_device();
  again.steady = until_step(step);
  const std::optional<Report> whole = run_for_report(std::move(again), install);
  if (!whole || whole->outcome != "ok") return;
  take_whole_run(*failed.report, *whole);
  try_expandable_segments(*failed.report, request, step, install);
  keep_json(*failed.report, failed.folder);
}

}  // namespace

std::optional<FailingBatch> find_failing_batch(const Report& fitted,
                                               const std::function<DiagnosisRequest(int64_t)>& with_batch,
                                               const Install& install) {
  const ReportOfDevice* const device = main_device_of(fitted);
  if (fitted.outcome != "ok" || device == nullptr || !device->batch || device->batch->inferred) return {};
  const int64_t available = available_bytes(*device);
  const int64_t batch = largest_batch_by_bytes(*device->batch, available) + 1;
  if (batch <= device->batch->batch) return {};
  try {
    std::optional<Report> report = run_for_report(with_batch(batch), install);
    const ReportOfDevice* const failed = report ? main_device_of(*report) : nullptr;
    if (failed == nullptr || report->outcome != "out_of_memory" || !failed->failure) return {};
    return FailingBatch{.batch = batch, .report = *std::move(report)};
  } catch (const Interrupted&) {  // what is known without it is still worth showing
    return {};
  }
}

uint32_t step_to_reach(const Report& report) {
  uint32_t step = 0;
  const bool failed = std::ranges::any_of(report.devices, [](const auto& one) { return one.failure.has_value(); });
  for (const ReportOfDevice& device : report.devices) {
    const bool has_steps =
        std::ranges::any_of(device.phases, [](const PhasePeak& one) { return one.phase == Phase::optimizer; });
    if (!has_steps || (failed && !device.failure)) continue;
    step = std::max(step, device.failure ? device.failure->step : device.peak.step);
  }
  return step;
}

VirtualHost with_ample_memory(VirtualHost host) {
  host.memory_bytes = kMaxGpuBytes;
  return host;
}

void complete(Diagnosis& failed, const DiagnosisRequest& request, const Install& install) {
  const VirtualHost* const host = request.device.virtual_host();
  if (host == nullptr || !failed.report || failed.report->outcome != "out_of_memory") return;
  try {
    take_complete_run(failed, *host, request, install);
  } catch (const Interrupted&) {  // what is known without it is still worth showing
  }
}

}  // namespace oomdiag
