#pragma once

#include <cstddef>
#include <cstdint>

// Memory of the host that CUDA knows nothing of: a program may pass any address, and one that is wrong is an error of
// its call and not the end of the process. The kernel says without a fault what may be read and written
// (process_vm_readv(2)). Where a container forbids that question, can_read and can_write believe every address.

namespace oomdiag {

/// Copies `bytes` from an address that may be wrong; false, and `to` is undefined, where not all of them can be read or the
/// question is forbidden.
bool read_safely(void* to, const void* from, size_t bytes) noexcept;

/// Whether the first and the last byte of the range may be read; or read and written: each is written with what it has.
bool can_read(const void* begin, size_t bytes) noexcept;
bool can_write(void* begin, size_t bytes) noexcept;

/// What this machine has for its processes (profiler/host.h), asked once; no bound where that is not known.
int64_t host_memory_bytes();

}  // namespace oomdiag
