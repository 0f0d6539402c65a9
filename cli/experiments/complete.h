#pragma once

#include <functional>
#include <optional>

#include "cli/device/device.h"
#include "cli/launch/diagnosis.h"
#include "cli/python/install.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// The optimizer step in which a run ran out of memory, else that of its peak: a run that is to be compared with it goes to
/// the end of that. 0 = none: steps of a program without an optimizer are nothing that a SteadyRule counts.
uint32_t step_to_reach(const Report& report);

/// The same devices with more memory than any program takes.
VirtualHost with_ample_memory(VirtualHost host);

/// Where `failed` ran out of memory on a virtual GPU: runs the program again with ample memory, and takes the need and
/// the fixes of the whole run into its report and report.json.
void complete(Diagnosis& failed, const DiagnosisRequest& request, const Install& install);

/// A batch that was run and does not fit.
struct FailingBatch {
  int64_t batch = 0;
  Report report{};  ///< of that run: its main device has the failure
};

/// Of a run that fits: runs it with the smallest batch that cannot, as its bytes alone are more than the GPU has; nullopt where none is
/// known. `with_batch` makes the request of a batch.
std::optional<FailingBatch> find_failing_batch(const Report& fitted,
                                               const std::function<DiagnosisRequest(int64_t)>& with_batch,
                                               const Install& install);

}  // namespace oomdiag
