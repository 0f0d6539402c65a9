#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace oomdiag {

/// What this process may use of its host. A cgroup bounds it, version 1 or 2, and so do those above that one: /proc
/// shows the whole machine. `root` is the root of the file system, another one in tests.
///
/// Bytes that all processes may take together: the machine's, or the least limit of a cgroup. nullopt where neither is known.
std::optional<int64_t> total_memory(const std::filesystem::path& root = "/");

/// Bytes that a new process may take: what the kernel calls available, and what each cgroup leaves of its limit, where the
/// cache of files counts as free. nullopt where that is not known.
std::optional<int64_t> available_memory(const std::filesystem::path& root = "/");

/// Cores that may be used at once: those of the affinity mask, and the cgroup's quota of time, rounded down; at least 1.
int available_cores(const std::filesystem::path& root = "/");

/// How many processes of this cgroup the kernel's OOM killer has ended so far; nullopt where it does not say.
std::optional<int64_t> count_oom_kills(const std::filesystem::path& root = "/");

}  // namespace oomdiag
