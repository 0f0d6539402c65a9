#pragma once

#include <functional>

#include "cli/launch/diagnosis.h"

namespace oomdiag {

/// More memory than any program takes, and the most that a virtual card can have.
constexpr int64_t kRoomBytes = int64_t{16} << 40;

/// Steps after which a run with room is ended though its peak still rises: it grows without end.
constexpr uint32_t kMaxSteps = 200;

/// The same devices with all the memory that any program wants.
VirtualHost with_room(VirtualHost host);

/// Where `failed` ran out of memory on a virtual card: runs the program again with room, and takes the need and the
/// fixes of the whole run into its report and report.json.
void complete(Diagnosis& failed, const DiagnosisRequest& request, const Install& install);

/// What larger batches did, by runs; 0 = none of those that were run.
struct LargerBatches {
  int64_t fits = 0, fails = 0;
  std::string place{};  ///< where `fails` runs out: "backward, MaxPool2DWithIndicesBackward0 ← pool1"
};

/// Of a run that fits on a virtual card: runs it with one more than the largest batch that is predicted to fit, and with a quarter
/// more. What fits becomes the largest batch of its report. `with_batch` makes the request of a batch.
LargerBatches find_larger_batches(Diagnosis& fitted, const std::function<DiagnosisRequest(int64_t)>& with_batch,
                                  const Install& install);

}  // namespace oomdiag
