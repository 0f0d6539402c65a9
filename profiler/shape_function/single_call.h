#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "profiler/shape_function/merge_sequences.h"
#include "profiler/shape_function/polynomial.h"

namespace oomdiag {

/// What a call that was made alone asked of the allocator, in order: the bytes of a request, or -n where it gave the n-th of them
/// back. nullopt where it could not be made.
using MadeAlone = std::optional<std::vector<int64_t>>;

/// The bytes of the requests.
std::vector<int64_t> requests_of(const std::vector<int64_t>& made);

/// The bytes that a rule gives at a point; nullopt where they are not known there.
using KnownSize = std::function<std::optional<int64_t>(uint32_t rule)>;

/// A whole number among the arguments of a call.
struct CallNumber {
  Polynomial polynomial{};
  /// Each dimension is rounded up to a multiple of this first, as kernels pad a length to 32.
  std::vector<int64_t> multiples{};
  /// In place of those: the elements of what an earlier call made, as of the space that an RNN reserves for its backward pass.
  std::optional<uint32_t> rule{};
  int64_t element_bytes = 1;  ///< … each of so many bytes

  std::optional<int64_t> at(const ShapePoint& point, const KnownSize& known_size) const;
  bool operator==(const CallNumber&) const = default;
};

/// An allocation of an earlier call whose size no polynomial gives.
struct EarlierSize {
  uint32_t rule = 0;
  std::vector<int64_t> sizes{};  ///< in each run
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
  std::vector<bool> is_result{};  ///< of each allocation: the call itself did not free it
  std::vector<uint32_t> rules{};  ///< of each allocation
  State state = State::unproved;  ///< proved: alone it allocated in every point of the runs what it did in the program
  std::vector<bool> lacks{};      ///< of each allocation, once proved: not made when the call is made again

  /// nullopt where it depends on a size that is not known there.
  std::optional<std::string> text_at(const ShapePoint& point, const KnownSize& known_size) const;
  /// What it does at points where it makes other allocations than in any run: all of it, in place of those.
  std::map<ShapePoint, std::vector<int64_t>> scripts{};

  /// Compares what it made alone in the points of the runs, in their order, and sets `state`.
  void prove(const std::vector<MadeAlone>& made);
  /// Of each allocation its size at another point, -1 where it lacks; nullopt where what it made fits no run's allocations, or
  /// more than one way.
  std::optional<std::vector<int64_t>> assign(const std::vector<int64_t>& made) const;
  /// Whether it leaves as many results as in every run.
  bool has_same_results(const std::vector<int64_t>& made) const;
};

/// The call at a point.
struct CallAtPoint {
  uint32_t call = 0;  ///< index of the SingleCall
  ShapePoint point{};
  std::string text{};
};

/// A call in the runs of a merged sequence.
struct CallInRuns {
  std::vector<uint32_t> calls{};        ///< index into each run's OpCalls; kNone where it made nothing there
  std::vector<uint32_t> allocations{};  ///< of the merged sequence, in order
};

/// The calls that allocated something, in order. What two runs call by different numbers may still be one call: its allocations are.
std::vector<CallInRuns> list_calls(const MergedSequence& merged);

/// nullopt where its arguments are not known or one of them follows from nothing. `points` are those of the runs.
std::optional<SingleCall> find_single_call(const MergedSequence& merged, const std::vector<ShapePoint>& points,
                                           const CallInRuns& call, const std::vector<EarlierSize>& earlier);

}  // namespace oomdiag
