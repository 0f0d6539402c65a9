#pragma once

#include <cstdint>

namespace oomdiag {

/// Addresses for memory of the GPUs, which no host may touch: `bytes` (whole pages of 2 MiB), as high as there is
/// space, or 0 where the process may have no more. They are cut from a few large reservations, so that a program with
/// many blocks does not run into the kernel's bound of mappings. Under memory_lock().
uintptr_t take_addresses(int64_t bytes);

/// Gives back what take_addresses gave. The reservation stays.
void give_addresses(uintptr_t begin, int64_t bytes);

/// Accessible memory of the host, 2 MiB-aligned; null where the process may have no more.
void* map_host_memory(int64_t bytes);
void unmap_host_memory(void* begin, int64_t bytes);

/// Notes why a process gets no more addresses; the program will see "out of memory", and the GPU is not to blame. Not under
/// memory_lock(): who hears of it may ask for memory.
void note_no_addresses();

}  // namespace oomdiag
