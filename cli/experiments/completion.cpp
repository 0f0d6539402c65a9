#include "cli/experiments/completion.h"

#include <algorithm>
#include <utility>

#include "cli/experiments/fix.h"
#include "cli/process/temporary_folder.h"
#include "cli/reports/reports.h"
#include "profiler/report/whole_run.h"

namespace oomdiag {

namespace {

/// A run of ours between the user's.
DiagnosisRequest unseen(DiagnosisRequest request) {
  request.keeps_output = true;
  request.shows_progress = false;
  return request;
}

}  // namespace

VirtualHost with_room(VirtualHost host) {
  host.memory_bytes = kRoomBytes;
  return host;
}

namespace {

// A run with room says nothing of holes. The one remedy for them is an environment variable: it is tried.
void try_expandable_segments(Report& failed, DiagnosisRequest request, const Install& install) {
  ReportOfDevice& device = failed.devices[failed.main_device];
  const auto remedy = std::find_if(device.remedies.begin(), device.remedies.end(),
                                   [](const Remedy& one) { return one.id == "expandable_segments"; });
  if (remedy == device.remedies.end() || !device.cause || device.cause->kind != CauseKind::fragmentation) return;
  const TemporaryFolder folder;
  request = unseen(std::move(request));
  request.base = folder.path();
  request.steady = SteadyRule{.most = kMostSteps};
  for (const auto& variable : expandable_segments().environment) request.environment.push_back(variable);
  const Diagnosis tried = diagnose(request, install);
  if (!tried.report || tried.report->main_device >= tried.report->devices.size()) return;
  const bool passed = tried.report->outcome == "ok";
  if (!passed && tried.report->outcome != "out_of_memory") return;
  remedy->fits = passed;
  if (passed) remedy->measured_peak_bytes = tried.report->devices[tried.report->main_device].peak.allocated_bytes;
}

}  // namespace

void complete(Diagnosis& failed, const DiagnosisRequest& request, const Install& install) {
  const VirtualHost* const host = request.device.virtual_host();
  if (host == nullptr || !failed.report || failed.report->outcome != "out_of_memory") return;
  const TemporaryFolder folder;
  DiagnosisRequest again = unseen(request);
  again.device = {.device = with_room(*host)};
  again.judged_bytes = host->bytes_of_device();
  again.base = folder.path();
  uint32_t step = 1;
  for (const ReportOfDevice& device : failed.report->devices) {
    if (device.cause && device.cause->kind == CauseKind::leak) return;  // what grows without end has no whole run
    if (device.failure) step = std::max(step, device.failure->step);
  }
  again.steady = SteadyRule{.at_least = step, .most = std::max(kMostSteps, step + 1)};
  const Diagnosis whole = diagnose(again, install);
  if (!whole.report || whole.report->outcome != "ok") return;
  take_whole_run(*failed.report, *whole.report);
  try_expandable_segments(*failed.report, request, install);
  keep_json(*failed.report, failed.folder);
}

}  // namespace oomdiag
