#include "cli/experiments/complete.h"

#include <algorithm>
#include <utility>

#include "cli/experiments/executor.h"
#include "cli/experiments/fix.h"
#include "cli/process/temporary_folder.h"
#include "cli/process/workers.h"
#include "cli/reports/reports.h"
#include "profiler/report/whole_run.h"

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

/// "backward, MaxPool2DWithIndicesBackward0 ← pool1"
std::string name_failure(const ReportFailure& failure) {
  std::string text(name_of(failure.phase));
  const char* between = ", ";
  for (const std::string& part : {failure.node.empty() ? failure.op : failure.node, failure.module}) {
    if (part.empty()) continue;
    text += between + part;
    between = " ← ";
  }
  return text;
}

// A run with room says nothing of holes. The one fix for them is an environment variable: it is tried.
void try_expandable_segments(Report& failed, DiagnosisRequest request, const Install& install) {
  ReportOfDevice& device = failed.devices[failed.main_device];
  const auto fix = std::find_if(device.fixes.begin(), device.fixes.end(),
                                [](const Fix& one) { return one.id == "expandable_segments"; });
  if (fix == device.fixes.end() || !device.cause || device.cause->kind != CauseKind::fragmentation) return;
  request.steady = SteadyRule{.most = kMaxSteps};
  for (const auto& variable : expandable_segments().environment) request.environment.push_back(variable);
  const std::optional<Report> tried = run_for_report(std::move(request), install);
  if (!tried || tried->main_device >= tried->devices.size()) return;
  const bool passed = tried->outcome == "ok";
  if (!passed && tried->outcome != "out_of_memory") return;
  fix->fits = passed;
  if (passed) fix->measured_peak_bytes = tried->devices[tried->main_device].peak.allocated_bytes;
}

void take_complete_run(Diagnosis& failed, const VirtualHost& host, const DiagnosisRequest& request,
                       const Install& install) {
  uint32_t step = 1;
  for (const ReportOfDevice& device : failed.report->devices) {
    if (device.cause && device.cause->kind == CauseKind::leak) return;  // what grows without end has no whole run
    if (device.failure) step = std::max(step, device.failure->step);
  }
  DiagnosisRequest again = request;
  again.device = {.device = with_room(host)};
  again.judged_bytes = host.bytes_of_device();
  again.steady = SteadyRule{.at_least = step, .most = std::max(kMaxSteps, step + 1)};
  const std::optional<Report> whole = run_for_report(std::move(again), install);
  if (!whole || whole->outcome != "ok") return;
  take_whole_run(*failed.report, *whole);
  try_expandable_segments(*failed.report, request, install);
  keep_json(*failed.report, failed.folder);
}

/// The smallest batch whose bytes alone, without what fragmentation adds, are more than the card has: it cannot fit.
int64_t smallest_too_large(const BatchModel& batch, const ReportOfDevice& device) {
  const int64_t left = device.device.total_bytes - device.card.non_pytorch_bytes - batch.fixed_bytes;
  if (left <= 0 || batch.scaling_bytes <= 0) return 0;
  return static_cast<int64_t>(static_cast<double>(left) / static_cast<double>(batch.scaling_bytes) *
                              static_cast<double>(batch.batch)) +
         1;
}

}  // namespace

FailingBatch find_failing_batch(const Report& fitted, const std::function<DiagnosisRequest(int64_t)>& with_batch,
                                const Install& install) {
  if (fitted.outcome != "ok" || fitted.main_device >= fitted.devices.size()) return {};
  const ReportOfDevice& device = fitted.devices[fitted.main_device];
  if (!device.batch || device.batch->inferred) return {};
  const int64_t batch = smallest_too_large(*device.batch, device);
  if (batch <= device.batch->batch) return {};
  try {
    const std::optional<Report> report = run_for_report(with_batch(batch), install);
    if (!report || report->outcome != "out_of_memory" || report->main_device >= report->devices.size()) return {};
    const std::optional<ReportFailure>& failure = report->devices[report->main_device].failure;
    return failure ? FailingBatch{batch, name_failure(*failure)} : FailingBatch{};
  } catch (const Interrupted&) {  // what is known without it is still worth showing
    return {};
  }
}

VirtualHost with_room(VirtualHost host) {
  host.memory_bytes = kRoomBytes;
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
