#pragma once

#include <cstdint>
#include <vector>

#include "profiler/shape_function/allocation_sequence.h"
#include "profiler/shape_function/op_calls.h"

namespace oomdiag {

/// Runs that differ in sizes and in what ops allocated for themselves, as one sequence: it has every workspace that any of them had.
struct MergedSequence {
  AllocationSequence sequence{};
  std::vector<std::vector<int64_t>>
      sizes{};                      ///< of each run: of each allocation of `sequence`, 0 where the run made none
  std::vector<OpCalls> op_calls{};  ///< of each run
  std::vector<std::vector<uint32_t>>
      calls{};  ///< of each run: of each allocation, index into its calls or OpCalls::kNone
};

MergedSequence start_merge(AllocationSequence first);

/// Takes another run in. False where it differs in more, and nothing is changed then.
bool merge(MergedSequence& merged, const AllocationSequence& other);

}  // namespace oomdiag
