#pragma once

#include <filesystem>

#include "profiler/trace/event_file.h"
#include "profiler/trace/format.h"

namespace oomdiag {

/// Of names nobody reads more: some times what a recorder writes (TraceBudget), for a damaged header may say anything.
inline constexpr uint64_t kMaxNamesBytes = uint64_t{32} << 20;

/// Copies the header of a trace. Its offsets and sizes are checked, so that sums of them do not overflow. Throws
/// Error(input) if `file`, which was opened as `path`, is no trace or its header makes no sense.
void read_header(const InputFile& file, const std::filesystem::path& path, TraceHeader& header);

/// Throws Error(input) if the file ends before what was written to it.
void check_length(const InputFile& file, const std::filesystem::path& path, const TraceHeader& header);

}  // namespace oomdiag
