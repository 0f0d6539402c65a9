#pragma once

namespace oomdiag {

/// Whether PyTorch's peak is clearly higher than when this was last true.
bool peak_has_grown() noexcept;

/// Makes the caching allocator tell us of every allocation, free and segment, and of every OOM. It must be initialised,
/// and this can not be undone. Throws what PyTorch throws where a backend has no such hooks.
void attach_allocator_hooks();

/// Writes the allocator's own figures of every device that was used. For the end of the process.
void write_memory_stats() noexcept;

}  // namespace oomdiag
