#pragma once

#include <functional>

#include "cli/launch/diagnosis.h"

namespace oomdiag {

/// More memory than any program takes, and the most that a virtual card can have.
constexpr int64_t kRoomBytes = int64_t{16} << 40;

/// Steps after which a run with room is ended though its peak still rises: it grows without end.
constexpr uint32_t kMostSteps = 200;

/// The same devices with all the memory that any program wants.
VirtualHost with_room(VirtualHost host);

/// Where `failed` ran out of memory on a virtual card: runs the program again with room, and takes the need and the
/// fixes of the whole run into its report and report.json.
void complete(Diagnosis& failed, const DiagnosisRequest& request, const Install& install);

/// Of a run that fits on a virtual card: runs it with the largest batch that is predicted to fit and with one more, and takes what
/// is proved into its report and report.json. `with_batch` makes the request of a batch.
void find_failing_batch(Diagnosis& fitted, const std::function<DiagnosisRequest(int64_t)>& with_batch,
                        const Install& install);

}  // namespace oomdiag
