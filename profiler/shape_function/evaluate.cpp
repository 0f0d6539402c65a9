#include "profiler/shape_function/evaluate.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/replay/allocator/simulator.h"

namespace oomdiag {
namespace {

using ItemKind = AllocationSequence::ItemKind;
using Structure = ShapeFunction::Structure;

constexpr int64_t kAllThereIs = kMaxBytes;

/// The size of each rule at a point.
std::vector<SizeEstimate> sizes_at(const ShapeFunction& function, const ShapePoint& point) {
  std::vector<SizeEstimate> sizes;
  for (const SizeRule& rule : function.rules()) sizes.push_back(rule.at(point));
  return sizes;
}

/// Which of the sizes that an allocation may have.
using Bytes = int64_t SizeEstimate::*;

/// Walks the items of a structure with the sizes of a point. `visit(item)` comes after each; it ends the walk by false.
class Walk {
 public:
  Walk(const Structure& from, const std::vector<SizeEstimate>& sizes, Bytes bytes, int64_t room_bytes,
       const AllocatorSettings& settings)
      : from_(from),
        sizes_(sizes),
        bytes_(bytes),
        allocator_(room_bytes, settings),
        blocks_(from.sequence.allocations.size(), AllocatorSimulator::kRefused) {}

  int64_t bytes_of(uint32_t allocation) const { return sizes_[from_.rules[allocation]].*bytes_; }
  const AllocatorSimulator& allocator() const { return allocator_; }

  /// False where the device is full.
  bool step(const AllocationSequence::Item& item) {
    if (item.kind != ItemKind::release_cached && bytes_of(item.allocation) == 0) return true;  // not made at this point
    switch (item.kind) {
      case ItemKind::alloc:
        blocks_[item.allocation] =
            allocator_.allocate(bytes_of(item.allocation), from_.sequence.allocations[item.allocation].group);
        return blocks_[item.allocation] != AllocatorSimulator::kRefused;
      case ItemKind::free:
        allocator_.free(blocks_[item.allocation]);
        return true;
      case ItemKind::free_requested:
        allocator_.request_free(blocks_[item.allocation]);
        return true;
      case ItemKind::free_completed:
        allocator_.complete_free(blocks_[item.allocation]);
        return true;
      case ItemKind::release_cached:
        allocator_.release_cached();
        return true;
    }
    return true;
  }

 private:
  const Structure& from_;
  const std::vector<SizeEstimate>& sizes_;
  Bytes bytes_;
  AllocatorSimulator allocator_;
  std::vector<uint32_t> blocks_;
};

uint32_t step_of(const AllocationSequence& sequence, size_t item) {
  return 1 + static_cast<uint32_t>(std::ranges::upper_bound(sequence.step_ends, item) - sequence.step_ends.begin());
}

ShapeEstimate walk_through(const Structure& from, const std::vector<SizeEstimate>& sizes, Bytes bytes,
                           int64_t room_bytes, const AllocatorSettings& settings) {
  Walk walk(from, sizes, bytes, room_bytes, settings);
  ShapeEstimate estimate{.fits = true};
  const auto& items = from.sequence.items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (walk.step(items[i])) continue;
    estimate.fits = false;
    estimate.step = step_of(from.sequence, i);
    estimate.place = from.sequence.places[from.sequence.allocations[items[i].allocation].context];
    estimate.requested_bytes = walk.bytes_of(items[i].allocation);
    break;
  }
  estimate.peak_allocated_bytes = walk.allocator().peak_allocated_bytes();
  estimate.peak_reserved_bytes = walk.allocator().peak_reserved_bytes();
  estimate.retries = walk.allocator().retries();
  return estimate;
}

/// Names the largest allocation whose size is not known; null where all are.
const AllocationSequence::Allocation* find_doubtful(const Structure& from, const std::vector<SizeEstimate>& sizes,
                                                    ShapeEstimate& estimate) {
  const AllocationSequence::Allocation* largest = nullptr;
  for (size_t a = 0; a < from.rules.size(); ++a) {
    const SizeEstimate& size = sizes[from.rules[a]];
    if (size.is_exact() || (largest != nullptr && size.bytes <= estimate.doubtful_bytes)) continue;
    estimate.doubtful_bytes = size.bytes;
    largest = &from.sequence.allocations[a];
  }
  return largest;
}

}  // namespace

ShapeEstimate evaluate(const ShapeFunction& function, const ShapePoint& point, int64_t room_bytes,
                       const AllocatorSettings& settings) {
  const Structure& from = function.nearest(point);
  const std::vector<SizeEstimate> sizes = sizes_at(function, point);
  ShapeEstimate estimate = walk_through(from, sizes, &SizeEstimate::bytes, room_bytes, settings);
  if (!function.is_within_structure(point)) {
    estimate.doubt = "runs around it differ in what they allocate";
    estimate.allocated_is_exact = estimate.reserved_is_exact = false;
    return estimate;
  }
  const AllocationSequence::Allocation* const doubtful = find_doubtful(from, sizes, estimate);
  if (doubtful == nullptr) return estimate;
  for (const Bytes extreme : {&SizeEstimate::least, &SizeEstimate::most}) {
    const ShapeEstimate other = walk_through(from, sizes, extreme, room_bytes, settings);
    const bool is_same = other.fits == estimate.fits;
    estimate.allocated_is_exact &= is_same && other.peak_allocated_bytes == estimate.peak_allocated_bytes;
    estimate.reserved_is_exact &= is_same && other.peak_reserved_bytes == estimate.peak_reserved_bytes;
  }
  if (!estimate.is_exact()) {
    estimate.doubt =
        fmt::format("no polynomial gives the size of an allocation of {}", from.sequence.places[doubtful->context]);
  }
  return estimate;
}

ShapeEstimate evaluate(const ShapeFunction& function, const ShapePoint& point, int64_t room_bytes) {
  return evaluate(function, point, room_bytes, function.nearest(point).sequence.settings);
}

Polynomial peak_formula(const ShapeFunction& function, const ShapePoint& point) {
  const Structure& from = function.nearest(point);
  const std::vector<SizeEstimate> sizes = sizes_at(function, point);
  Walk walk(from, sizes, &SizeEstimate::bytes, kAllThereIs, from.sequence.settings);
  size_t end = 0;
  int64_t peak = 0;
  const auto& items = from.sequence.items;
  for (size_t i = 0; i < items.size() && walk.step(items[i]); ++i) {
    if (walk.allocator().allocated_bytes() <= peak) continue;
    peak = walk.allocator().allocated_bytes();
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
