#include "cli/completion.h"

#include <algorithm>

#include "cli/reports.h"
#include "cli/temporary_folder.h"
#include "profiler/report/whole_run.h"

namespace oomdiag {

DiagnosisRequest with_room(DiagnosisRequest request) {
  const DeviceChoice& device = request.device;
  request.judged_bytes = device.memory_bytes > 0 ? device.memory_bytes : device.cards.front().total_bytes;
  request.device.memory_bytes = kRoomBytes;
  request.keeps_output = true;
  request.shows_progress = false;
  return request;
}

void complete(Diagnosis& failed, const DiagnosisRequest& request, const Install& install) {
  if (!request.device.is_virtual() || !failed.report || failed.report->outcome != "out_of_memory") return;
  const TemporaryFolder folder;
  DiagnosisRequest again = with_room(request);
  again.base = folder.path();
  uint32_t step = 1;
  for (const ReportOfDevice& device : failed.report->devices) {
    if (device.cause && device.cause->kind == "leak") return;  // what grows without end has no whole run
    if (device.failure) step = std::max(step, device.failure->step);
  }
  again.steady = SteadyRule{.at_least = step, .most = std::max(kMostSteps, step + 1)};
  const Diagnosis whole = diagnose(again, install);
  if (!whole.report || whole.report->outcome != "ok") return;
  take_whole_run(*failed.report, *whole.report);
  keep_json(*failed.report, failed.folder);
}

}  // namespace oomdiag
