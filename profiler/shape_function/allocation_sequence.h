#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profiler/replay/allocator/settings.h"
#include "profiler/shape_function/op_calls.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What a program asked of the caching allocator of one device, in order: what a run with other sizes is aligned with, and what
/// the allocator's algorithm can be run on again.
struct AllocationSequence {
  enum class ItemKind : uint8_t { alloc, free, free_requested, free_completed, release_cached };
  struct Item {
    ItemKind kind = ItemKind::alloc;
    uint32_t allocation = 0;  ///< which one, by its order; 0 for release_cached

    bool operator==(const Item&) const = default;
  };
  struct Allocation {
    int64_t requested_bytes = 0;
    uint64_t place =
        0;  ///< a hash of op, node, module and line, and of whether the op itself freed it: the same in every run
    bool is_temporary = false;  ///< the op itself freed it
    bool is_optional = false;   ///< … and goes on with less where it fails
    uint32_t group = 0;         ///< stream and pool, numbered as they appear
    uint32_t context = 0;       ///< index into `places`
    uint32_t call = 0;          ///< of the outermost operator, as in the trace; 0: of none
  };

  std::vector<Item> items{};
  std::vector<Allocation> allocations{};
  std::vector<std::string> places{};  ///< for people: "aten::mm ← layer3", by the contexts of the trace
  std::vector<size_t> step_ends{};    ///< how many items come before the end of step 1, 2, …
  AllocatorSettings settings{};
  int64_t non_pytorch_bytes = 0;  ///< at most held on the device by others than the allocator
  int64_t total_bytes = 0;        ///< of the device
  bool ended = false;             ///< the program came to its end by itself; else it was stopped in the middle
  OpCalls calls{};                ///< where the run was made to record them
  std::string unusable{};         ///< why it says nothing of other sizes, or empty

  /// Keeps the first `steps` steps only.
  void cut(size_t steps);
};

/// The sequence of the device that most was asked of. Where the trace does not hold all of it, or the program ran out of memory,
/// `unusable` says so.
AllocationSequence read_allocation_sequence(const Trace& trace);

}  // namespace oomdiag
