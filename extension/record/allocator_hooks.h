#pragma once

#include <cstdint>

namespace oomdiag {

/// True if PyTorch's peak is clearly higher than when this was last true.
bool note_peak() noexcept;

/// Whether PyTorch took memory on more than one GPU: then several threads run a backward pass. A machine may have more GPUs than
/// the program uses.
bool uses_several_devices() noexcept;

/// Makes the caching allocator call us for every allocation, free and segment, and every OOM. It must be
/// initialised, and this can not be undone. Throws what PyTorch throws where a backend has no such hooks.
void attach_allocator_hooks();

/// A library asked the virtual GPU itself for so many bytes, for a handle or its code, and did not get them: written as
/// an OOM of the op that runs. On the thread that asked.
void note_library_oom(int device, int64_t bytes) noexcept;

/// Writes the allocator's own figures of every device that was used. For the end of the process.
void write_memory_stats() noexcept;

}  // namespace oomdiag
