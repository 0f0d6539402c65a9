#pragma once

#include <cstdint>
#include <optional>

#include "profiler/event.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Whether it is one of those by which recordings are laid beside each other.
constexpr bool is_of_block(EventKind kind) { return kind == EventKind::alloc || kind == EventKind::free_requested; }

/// Where a recording that begins in the middle of a program, as a snapshot does whose history was switched on late or whose
/// ring was small, begins in a recording of the whole.
struct Window {
  uint64_t first_event = 0;      ///< index into the events of the whole
  uint64_t blocks_before = 0;    ///< allocs and frees of the whole before it
  uint32_t step = 0;             ///< of the whole, 0 = not known
  uint64_t alive = 0;            ///< blocks that the whole has in use there
  int64_t alive_bytes = 0;       ///< requested
  uint64_t alive_elsewhere = 0;  ///< in use in one of the two only

  bool operator==(const Window&) const = default;
};

/// The place from which on most of the allocs and frees of `part` on one GPU are those of `whole`; of several, one with the
/// same blocks in use, and the last into which `part` fits. Nullopt where nothing longer than a few events agrees.
std::optional<Window> find_window(const Trace& part, const Trace& whole, uint8_t device);

}  // namespace oomdiag
