#include "cli/experiments/complete.h"

#include <algorithm>
#include <array>
#include <utility>

#include "cli/experiments/executor.h"
#include "cli/experiments/fix.h"
#include "cli/process/temporary_folder.h"
#include "cli/process/workers.h"
#include "cli/reports/reports.h"
#include "profiler/report/whole_run.h"

namespace oomdiag {
namespace {

/// The reports on runs of which nothing is left; nullopt where there is none.
std::vector<std::optional<Report>> run_for_reports(std::vector<DiagnosisRequest> requests, const Install& install) {
  const TemporaryFolder folder;
  for (DiagnosisRequest& request : requests) {
    request.base = folder.path();
    request.keeps_output = true;
    request.shows_progress = false;
  }
  Executor executor(install);
  std::vector<std::optional<Report>> reports;
  for (const Executed& executed : executor.run(requests, [](std::size_t) {})) {
    reports.push_back(executed.has_report() ? std::optional(load_report(executed.folder / "report.json"))
                                            : std::nullopt);
  }
  return reports;
}

std::optional<Report> run_for_report(DiagnosisRequest request, const Install& install) {
  return run_for_reports({std::move(request)}, install).front();
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

// The prediction leaves a margin for what it does not see, so the batch behind it often fits, too, and a larger one shows where
// it ends.
LargerBatches try_larger_batches(BatchModel& batch, const std::function<DiagnosisRequest(int64_t)>& with_batch,
                                 const Install& install) {
  const std::array<int64_t, 2> tried = {batch.largest_batch + 1, batch.largest_batch + batch.largest_batch / 4 + 1};
  const auto reports = run_for_reports({with_batch(tried[0]), with_batch(tried[1])}, install);
  LargerBatches larger;
  for (size_t i = 0; i < tried.size(); ++i) {
    const std::optional<Report>& report = reports[i];
    if (!report || report->main_device >= report->devices.size()) break;
    const std::optional<ReportFailure>& failure = report->devices[report->main_device].failure;
    if (report->outcome == "ok") {
      larger.fits = batch.largest_batch = tried[i];
    } else if (report->outcome == "out_of_memory" && failure) {
      larger.fails = tried[i];
      larger.place = name_failure(*failure);
      break;
    }
  }
  return larger;
}

}  // namespace

LargerBatches find_larger_batches(Diagnosis& fitted, const std::function<DiagnosisRequest(int64_t)>& with_batch,
                                  const Install& install) {
  Report* const report = fitted.report ? &*fitted.report : nullptr;
  if (report == nullptr || report->outcome != "ok" || report->main_device >= report->devices.size()) return {};
  std::optional<BatchModel>& batch = report->devices[report->main_device].batch;
  if (!batch || batch->inferred || batch->largest_batch <= batch->batch) return {};
  try {
    const LargerBatches larger = try_larger_batches(*batch, with_batch, install);
    keep_json(*report, fitted.folder);
    return larger;
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
