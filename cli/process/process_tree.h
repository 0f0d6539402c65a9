#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace oomdiag {

/// A process and when it began, in ticks since boot: its number alone may be another's later.
struct KnownProcess {
  pid_t pid = 0;
  uint64_t start = 0;
};

/// `root` and all that it started, as far as the parents of processes show: those whose parent has ended are not among
/// them.
std::vector<KnownProcess> find_tree(pid_t root);

/// Ends those that still run, at once.
void kill_processes(const std::vector<KnownProcess>& processes);

}  // namespace oomdiag
