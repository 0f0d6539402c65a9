#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "profiler/shape_function/allocation_sequence.h"
#include "profiler/shape_function/merge_sequences.h"
#include "profiler/shape_function/polynomial.h"
#include "profiler/shape_function/single_call.h"

namespace oomdiag {

/// A run that the function is learned from.
struct ShapeSample {
  ShapePoint point{};
  AllocationSequence sequence{};
};

/// The bytes of an allocation at a point, and between which they are taken to be.
struct SizeEstimate {
  int64_t bytes = 0, least = 0, most = 0;

  bool is_exact() const { return least == most; }
  bool operator==(const SizeEstimate&) const = default;
};

/// How the size of some allocations follows from the dimensions.
struct SizeRule {
  bool exact = false;  ///< `polynomial` gave every run, also those that it was not made from
  Polynomial polynomial{};
  bool is_temporary = false;  ///< an op made it for itself
  /// Where no polynomial does (a kernel's workspace, rounding, data): what the runs showed, of which the nearest two count. 0: not
  /// allocated.
  std::vector<ShapePoint> points{};
  std::vector<int64_t> sizes{};

  SizeEstimate at(const ShapePoint& point) const;
  bool operator==(const SizeRule&) const = default;
};

/// The allocations of a program as a function of its dimensions. Learned from a few runs. Those that did the same, save for sizes
/// and for what ops allocate for themselves, are one structure. Where two runs have different ones there is a breakpoint between
/// them.
class ShapeFunction {
 public:
  /// A call whose allocations' sizes no polynomial gives.
  struct CallInSequence {
    uint32_t single_call = 0;
    std::vector<uint32_t> allocations{};
  };
  struct Structure {
    std::vector<ShapePoint> points{};  ///< of its runs
    AllocationSequence sequence{};     ///< with all that any of them allocated
    std::vector<uint32_t> rules{};     ///< of each allocation: index into rules()
    std::vector<CallInSequence> calls{};
    std::vector<uint32_t> call_of{};  ///< of each allocation: index into `calls`, or OpCalls::kNone
  };

  /// Learns from these runs, of different points. `unknown` says why it could not.
  static ShapeFunction learn(std::vector<ShapeSample> samples);

  const std::string& unknown() const { return unknown_; }
  const std::vector<SizeRule>& rules() const { return rules_; }
  const std::vector<Structure>& structures() const { return structures_; }
  /// That of the run whose point is nearest, by the ratios of the dimensions.
  const Structure& nearest(const ShapePoint& point) const;
  /// Whether `point` and the run nearest to it have no breakpoint between them, as far as the other runs show.
  bool is_within_structure(const ShapePoint& point) const;
  /// A dimension is 1 that was 1 in no run: then other tensors are contiguous, so that other copies are made.
  bool has_new_one(const ShapePoint& point) const;

  /// The operator calls that, made alone, show the sizes at `points` that no polynomial gives; and, first, those at the
  /// points of the runs, which show whether such a call alone allocates what it did in the program. Without those that
  /// were taken. Some can be made only when others are known, so list again after take().
  std::vector<CallAtPoint> list_unknown_calls(std::span<const ShapePoint> points) const;
  /// What a call of a structure does at a point where it makes other allocations than in any run; null elsewhere.
  const std::vector<int64_t>* script_of(const CallInSequence& call, const ShapePoint& point) const;
  /// What these calls allocated when they were made alone. From then on sizes that they show are known, as those of a
  /// run are.
  void take(std::span<const CallAtPoint> calls, std::span<const MadeAlone> made);

 private:
  void find_rules(const std::vector<MergedSequence>& merged);
  void find_single_calls(const MergedSequence& merged, Structure& structure);
  void take_at_point(SingleCall& call, const ShapePoint& point, const MadeAlone& made);
  std::optional<std::string> text_of(const SingleCall& call, const ShapePoint& point) const;
  uint32_t add_rule(SizeRule rule);

  std::vector<Structure> structures_;
  std::vector<SizeRule> rules_;
  std::vector<SingleCall> single_calls_;
  std::set<std::pair<uint32_t, ShapePoint>> taken_;
  std::string unknown_;
};

}  // namespace oomdiag
