#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/shape_function/merge_sequences.h"
#include "profiler/shape_function/polynomial.h"

namespace oomdiag {

/// What a call that was made alone asked of the allocator, in order; nullopt where it could not be made.
using MadeAlone = std::optional<std::vector<int64_t>>;

/// A whole number among the arguments of a call.
struct CallNumber {
  Polynomial polynomial{};
  std::vector<int64_t>
      multiples{};  ///< each dimension is rounded up to a multiple of this first, as kernels pad a length to 32

  int64_t at(const ShapePoint& point) const;
  bool operator==(const CallNumber&) const = default;
};

/// An operator call that allocates what no polynomial gives, as a workspace that a library chooses. Its arguments are polynomials,
/// so it can be made at any point without the program around it, and what it allocates there is seen. Calls of the same arguments
/// and allocations in every run are one.
struct SingleCall {
  enum class State : uint8_t { unproved, proved, refuted };

  std::string form{};                         ///< see OpCalls
  std::vector<CallNumber> numbers{};          ///< for the form
  std::vector<ShapePoint> points{};           ///< of the runs
  std::vector<std::vector<int64_t>> sizes{};  ///< of each run: of each allocation, 0 where the run did not make it
  std::vector<bool> may_lack{};   ///< of each allocation: a polynomial gives it, and it may belong to the process
  std::vector<uint32_t> rules{};  ///< of each allocation
  State state = State::unproved;  ///< proved: alone it allocated in every point of the runs what it did in the program
  std::vector<bool> lacks{};      ///< of each allocation, once proved: not made when the call is made again

  std::string text_at(const ShapePoint& point) const;
  /// Compares what it made alone in the points of the runs, in their order, and sets `state`.
  void prove(const std::vector<MadeAlone>& made);
  /// Of each allocation its size at another point, -1 where it lacks; nullopt where what it made fits no run's allocations, or
  /// more than one way.
  std::optional<std::vector<int64_t>> assign(const std::vector<int64_t>& made) const;
};

/// The call at a point.
struct CallAtPoint {
  uint32_t call = 0;  ///< index of the SingleCall
  ShapePoint point{};
  std::string text{};
};

/// The call with this number in each run of the merged ones, with these allocations of the merged sequence; nullopt where its
/// arguments are not known or no polynomial gives one of them.
std::optional<SingleCall> find_single_call(const MergedSequence& merged, const std::vector<ShapePoint>& points,
                                           uint32_t call, const std::vector<uint32_t>& allocations);

}  // namespace oomdiag
