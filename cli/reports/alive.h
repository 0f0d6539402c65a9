#pragma once

#include <sys/types.h>

#include <filesystem>

namespace oomdiag {

/// Whether the process `pid` has `file` mapped, as a program has the trace that it is writing. False where that cannot be
/// seen: another user's process, or one of another container.
bool has_mapped(pid_t pid, const std::filesystem::path& file);

}  // namespace oomdiag
