#pragma once

#include <filesystem>
#include <functional>

namespace oomdiag {

/// Finds the place for the trace of this process in the run folder `run`, where several processes may do so at once:
///   run/rank-N/trace   of rank N of several (RANK, WORLD_SIZE)
///   run/trace          of the first other process that uses CUDA
///   run/<pid>/trace    of the next ones, and where a name is taken (a restarted rank, a program after exec)
/// and calls `make` with it, which is to make the file and throws Error(environment) where there is one. Throws that.
void place_trace(const std::filesystem::path& run, const std::function<void(const std::filesystem::path&)>& make);

/// Makes a folder, and those that it lies in, unless it is there. A trace tells command lines and paths: only its owner may
/// look inside.
void make_private_folder(const std::filesystem::path& folder) noexcept;

/// The value of an environment variable, empty where it is not set.
const char* environment(const char* name) noexcept;
int environment_number(const char* name, int otherwise) noexcept;

}  // namespace oomdiag
