#pragma once

#include <cstddef>

namespace oomdiag {

/// Whether all of both ranges may be touched (memory.h).
bool can_copy(void* to, const void* from, size_t bytes);

/// Sets `count` numbers of 1, 2 or 4 bytes, on a GPU or in memory of the host, where can_copy_to holds.
void set_numbers(void* to, unsigned value, size_t number_bytes, size_t count);

}  // namespace oomdiag
