#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "profiler/trace/shared_file.h"

// Other processes on the same virtual GPUs. A GPU is one for all processes of a job, as a real one is: what one of
// them takes, another cannot have. A file in the run folder (OOMDIAG_OUTPUT) holds one row per process, with the bytes
// that it has of each GPU; a process that takes memory locks the file, adds the rows up, and writes its own. A process that
// was killed leaves its row behind: rows of processes that are gone do not count. Without a run folder each process has
// its GPUs for itself.

namespace oomdiag {

/// Opens the file, so that the others can be counted. A failure leaves the process alone on its GPUs.
void open_shared_gpus() noexcept;

/// Takes a row.
void join_shared_gpus() noexcept;

/// Holds the file while it lives, so that two processes cannot take the same bytes. Costs nothing without a run folder.
class SharedGpusLock {
 public:
  SharedGpusLock() noexcept;
  ~SharedGpusLock();
  SharedGpusLock(const SharedGpusLock&) = delete;
  SharedGpusLock& operator=(const SharedGpusLock&) = delete;

 private:
  FileDescriptor file_;
};

/// What the other living processes have of the GPU at that place in the machine.
int64_t count_bytes_of_others(int index) noexcept;

/// Writes this process's row.
void publish_own_bytes(int index, int64_t bytes) noexcept;

struct OtherProcess {
  pid_t pid = 0;
  int64_t bytes = 0;
};

/// The other living processes that have a part of the GPU.
std::vector<OtherProcess> list_others(int index);

}  // namespace oomdiag
