#pragma once

#include <cstdint>
#include <optional>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// The batch size that the shapes of a moment tell: the smallest first size that some saved tensor has, and that divides the
/// first sizes of those that hold four fifths of the bytes ([8, 1024, 768] and [8192, 3072]: 8). None where there is no such.
std::optional<int64_t> find_batch(const Moment& moment);

/// Tells the largest batch of a run that fits where nobody told its batch size. Says that it was inferred.
void infer_batch(const DeviceHistory& device, ReportOfDevice& report);

}  // namespace oomdiag
