#pragma once

#include <filesystem>
#include <memory>

#include "profiler/trace/writer.h"

namespace oomdiag {

/// A trace that has just been made.
struct PlacedTrace {
  std::filesystem::path file;
  std::unique_ptr<TraceWriter> writer;
};

/// Makes the trace of this process in the run folder `run`, where several processes may do so at once:
///   run/rank-N/trace   of rank N of several (RANK, WORLD_SIZE)
///   run/trace          of the first other process that uses CUDA
///   run/<pid>/trace    of the next ones, and where a name is taken (a restarted rank, a program after exec)
/// Throws Error(environment).
PlacedTrace place_trace(const std::filesystem::path& run, uint32_t device_count, const TraceBudget& budget);

/// Makes a folder, and those that it lies in, unless it is there. A trace contains command lines and paths: only its
/// owner may look inside. False if it is no folder, or somebody else's, or others may write into it.
bool make_trace_folder(const std::filesystem::path& folder);

}  // namespace oomdiag
