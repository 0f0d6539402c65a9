#include "profiler/shape_function/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/allocator/simulator.h"
#include "profiler/shape_function/allocation_sequence.h"
#include "profiler/shape_function/op_calls.h"
#include "profiler/shape_function/polynomial.h"
#include "profiler/shape_function/shape_function.h"

namespace oomdiag {
namespace {

using ItemKind = AllocationSequence::ItemKind;
using Structure = ShapeFunction::Structure;

constexpr int64_t kAllThereIs = kMaxBytes;

/// Which of the sizes that an allocation may have.
using Bytes = int64_t SizeEstimate::*;

/// A structure at a point: the size of each rule, and of each call what it does in place of its allocations in the runs, or null.
struct AtPoint {
  const Structure& from;
  std::vector<SizeEstimate> sizes{};
  std::vector<const std::vector<int64_t>*> scripts{};

  bool has_script(uint32_t allocation) const {
    const uint32_t call = from.call_of[allocation];
    return call != OpCalls::kNone && scripts[call] != nullptr;
  }
};

AtPoint compute_at(const ShapeFunction& function, const ShapePoint& point) {
  AtPoint at{.from = function.nearest(point)};
  for (const SizeRule& rule : function.rules()) at.sizes.push_back(rule.at(point));
  for (const auto& call : at.from.calls) at.scripts.push_back(function.script_of(call, point));
  return at;
}

/// Allocates and frees the items of a structure in turn, with the sizes of a point.
class SequenceRun {
 public:
  SequenceRun(const AtPoint& at, Bytes bytes, int64_t available_bytes, const AllocatorSettings& settings)
      : at_(at),
        bytes_(bytes),
        allocator_(available_bytes, settings),
        blocks_(at.from.sequence.allocations.size(), AllocatorSimulator::kRefused),
        made_(at.scripts.size()) {}

  const AllocatorSimulator& allocator() const { return allocator_; }
  int64_t failed_bytes() const { return failed_bytes_; }
  /// A convolution did not get its workspace, and is assumed to go on with none.
  bool went_without() const { return !failed_rules_.empty(); }

  /// False where the device is full.
  bool step(const AllocationSequence::Item& item) {
    if (item.kind == ItemKind::release_cached) {
      allocator_.release_cached();
      return true;
    }
    if (at_.has_script(item.allocation)) return step_of_script(item);
    const int64_t bytes = at_.sizes[at_.from.rules[item.allocation]].*bytes_;
    if (bytes == 0) return true;  // not made at this point
    if (item.kind == ItemKind::alloc) {
      const bool is_optional = at_.from.sequence.allocations[item.allocation].is_optional;
      return allocate(bytes, item.allocation, is_optional, blocks_[item.allocation]);
    }
    free(item.kind, blocks_[item.allocation]);
    return true;
  }

 private:
  /// False where the program ends there. The plan that a convolution has found is taken in later steps too.
  bool allocate(int64_t bytes, uint32_t like, bool is_optional, uint32_t& block) {
    const uint32_t rule = at_.from.rules[like];
    if (is_optional && failed_rules_.contains(rule)) return true;
    block = allocator_.allocate(bytes, at_.from.sequence.allocations[like].group);
    if (block != AllocatorSimulator::kRefused) return true;
    if (is_optional) failed_rules_.insert(rule);
    if (!is_optional) failed_bytes_ = bytes;
    return is_optional;
  }

  void free(ItemKind kind, uint32_t block) {
    if (block == AllocatorSimulator::kRefused) return;
    if (kind == ItemKind::free) allocator_.free(block);
    if (kind == ItemKind::free_requested) allocator_.request_free(block);
    if (kind == ItemKind::free_completed) allocator_.complete_free(block);
  }

  /// The call as a whole at its first allocation; of the others only the frees of its results are left.
  bool step_of_script(const AllocationSequence::Item& item) {
    const uint32_t call = at_.from.call_of[item.allocation];
    if (item.kind == ItemKind::alloc) {
      if (made_[call]) return true;
      made_[call] = true;
      return make_call(call);
    }
    free(item.kind, blocks_[item.allocation]);
    return true;
  }

  bool make_call(uint32_t call) {
    const std::vector<uint32_t>& allocations = at_.from.calls[call].allocations;
    const std::vector<int64_t>& script = *at_.scripts[call];
    const bool may_fail =
        std::ranges::any_of(allocations, [&](uint32_t a) { return at_.from.sequence.allocations[a].is_optional; });
    std::vector<uint32_t> made;
    std::vector<bool> is_left;
    for (const int64_t event : script) {
      if (event < 0) {
        free(ItemKind::free, made.at(static_cast<size_t>(-event - 1)));
        continue;
      }
      made.push_back(AllocatorSimulator::kRefused);
      is_left.push_back(std::ranges::find(script, -std::ssize(made)) == script.end());
      if (!allocate(event, allocations.front(), may_fail && !is_left.back(), made.back())) return false;
    }
    size_t next = 0;
    for (const uint32_t allocation : allocations) {
      if (at_.from.sequence.allocations[allocation].is_temporary) continue;
      while (next < made.size() && !is_left[next]) ++next;
      if (next < made.size()) blocks_[allocation] = made[next++];
    }
    return true;
  }

  const AtPoint& at_;
  Bytes bytes_;
  AllocatorSimulator allocator_;
  std::vector<uint32_t> blocks_;
  std::vector<bool> made_;  ///< of each call with a script
  int64_t failed_bytes_ = 0;
  std::set<uint32_t> failed_rules_;  ///< of workspaces
};

uint32_t step_of(const AllocationSequence& sequence, size_t item) {
  return 1 + static_cast<uint32_t>(std::ranges::upper_bound(sequence.step_ends, item) - sequence.step_ends.begin());
}

ShapeEstimate run_sequence(const AtPoint& at, Bytes bytes, int64_t available_bytes, const AllocatorSettings& settings) {
  SequenceRun run(at, bytes, available_bytes, settings);
  const Structure& from = at.from;
  ShapeEstimate estimate{.fits = true};
  const auto& items = from.sequence.items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (run.step(items[i])) continue;
    estimate.fits = false;
    estimate.step = step_of(from.sequence, i);
    estimate.place = from.sequence.places[from.sequence.allocations[items[i].allocation].context];
    estimate.requested_bytes = run.failed_bytes();
    break;
  }
  estimate.peak_allocated_bytes = run.allocator().peak_allocated_bytes();
  estimate.peak_reserved_bytes = run.allocator().peak_reserved_bytes();
  estimate.retries = run.allocator().retries();
  if (run.went_without()) {
    estimate.doubt = "a convolution does not get its workspace, and what it takes then is not known";
    estimate.allocated_is_exact = estimate.reserved_is_exact = false;
  }
  return estimate;
}

/// Names the largest allocation whose size is not known; null where all are.
const AllocationSequence::Allocation* find_doubtful(const AtPoint& at, ShapeEstimate& estimate) {
  const AllocationSequence::Allocation* largest = nullptr;
  for (uint32_t a = 0; a < at.from.rules.size(); ++a) {
    const SizeEstimate& size = at.sizes[at.from.rules[a]];
    if (size.is_exact() || at.has_script(a) || (largest != nullptr && size.bytes <= estimate.doubtful_bytes)) continue;
    estimate.doubtful_bytes = size.bytes;
    largest = &at.from.sequence.allocations[a];
  }
  return largest;
}

}  // namespace

ShapeEstimate evaluate(const ShapeFunction& function, const ShapePoint& point, int64_t available_bytes,
                       const AllocatorSettings& settings) {
  const AtPoint at = compute_at(function, point);
  ShapeEstimate estimate = run_sequence(at, &SizeEstimate::bytes, available_bytes, settings);
  if (function.has_new_one(point) || !function.is_within_structure(point)) {
    estimate.doubt = function.has_new_one(point) ? "no run that it was learned from had a 1 there"
                                                 : "runs around it differ in what they allocate";
    estimate.allocated_is_exact = estimate.reserved_is_exact = false;
    return estimate;
  }
  const AllocationSequence::Allocation* const doubtful = find_doubtful(at, estimate);
  if (doubtful == nullptr || !estimate.doubt.empty()) return estimate;
  for (const Bytes extreme : {&SizeEstimate::least, &SizeEstimate::most}) {
    const ShapeEstimate other = run_sequence(at, extreme, available_bytes, settings);
    const bool is_same = other.fits == estimate.fits;
    estimate.allocated_is_exact &= is_same && other.peak_allocated_bytes == estimate.peak_allocated_bytes;
    estimate.reserved_is_exact &= is_same && other.peak_reserved_bytes == estimate.peak_reserved_bytes;
  }
  if (!estimate.is_exact()) {
    estimate.doubt =
        fmt::format("no polynomial gives the size of an allocation of {}", at.from.sequence.places[doubtful->context]);
  }
  return estimate;
}

ShapeEstimate evaluate(const ShapeFunction& function, const ShapePoint& point, int64_t available_bytes) {
  return evaluate(function, point, available_bytes, function.nearest(point).sequence.settings);
}

Polynomial peak_formula(const ShapeFunction& function, const ShapePoint& point) {
  const AtPoint at = compute_at(function, point);
  const Structure& from = at.from;
  SequenceRun run(at, &SizeEstimate::bytes, kAllThereIs, from.sequence.settings);
  size_t end = 0;
  int64_t peak = 0;
  const auto& items = from.sequence.items;
  for (size_t i = 0; i < items.size() && run.step(items[i]); ++i) {
    if (run.allocator().allocated_bytes() <= peak) continue;
    peak = run.allocator().allocated_bytes();
    end = i + 1;
  }
  std::vector<bool> alive(from.sequence.allocations.size());
  for (size_t i = 0; i < end; ++i) {
    if (items[i].kind == ItemKind::alloc) alive[items[i].allocation] = true;
    if (items[i].kind == ItemKind::free || items[i].kind == ItemKind::free_requested)
      alive[items[i].allocation] = false;
  }
  Polynomial sum;
  for (size_t a = 0; a < alive.size(); ++a) {
    if (!alive[a]) continue;
    const SizeRule& rule = function.rules()[from.rules[a]];
    const Polynomial fixed{{{static_cast<double>(rule.at(point).bytes), std::vector<uint8_t>(point.size(), 0)}}};
    sum += rule.exact ? rule.polynomial : fixed;
  }
  return sum;
}

}  // namespace oomdiag
