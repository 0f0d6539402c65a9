#include "profiler/explain/step/whole_step.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include "profiler/explain/step/what_if.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"

namespace oomdiag {
namespace {

using Origin = std::tuple<Phase, std::string_view, std::string_view, std::string_view, std::string_view>;

Origin origin_of(const StepAllocation& block) {
  const Where& made = block.made;
  return {block.phase, made.node, made.op, made.module, made.source};
}

/// Differences of a twentieth are none.
bool is_about(int64_t a, int64_t b) { return std::abs(a - b) * 20 <= std::max(a, b); }

// Where memory is short, cuDNN may go on with another workspace.
bool is_compared(const StepAllocation& block) { return block.is_of_step() && block.category != Category::workspace; }

// A block may hold up to 1 MiB more than was asked for, if the allocator did not split it.
constexpr int64_t kSlackBytes = kMiB;

/// Sizes of what a step allocates, by place. Each can be taken once.
class Sizes {
 public:
  explicit Sizes(const StepAllocations& step_allocations) {
    for (const StepAllocation& block : step_allocations.blocks) {
      if (is_compared(block)) sizes_[origin_of(block)].insert(block.bytes);
    }
  }
  bool take(const StepAllocation& block) {
    const auto sizes = sizes_.find(origin_of(block));
    if (sizes == sizes_.end()) return false;
    const auto size = sizes->second.lower_bound(block.bytes - kSlackBytes);
    if (size == sizes->second.end() || *size > block.bytes + kSlackBytes) return false;
    sizes->second.erase(size);
    return true;
  }

 private:
  std::map<Origin, std::multiset<int64_t>> sizes_;
};

/// What became of the blocks that a step began with, by what they are. What is made anew a little larger each time (a cache
/// of keys and values) is the same.
class Lifetimes {
 public:
  explicit Lifetimes(const StepAllocations& step_allocations) {
    for (const StepAllocation& block : step_allocations.blocks) {
      if (!block.is_of_step()) by_origin_[origin_of(block)].emplace(block.bytes, block.died);
    }
  }
  /// Of the next block like this one; kNever where it lives, or is not known.
  uint32_t take(const StepAllocation& block) {
    const auto place = by_origin_.find(origin_of(block));
    if (place == by_origin_.end()) return StepAllocation::kNever;
    auto& sizes = place->second;
    auto found = sizes.lower_bound(block.bytes);
    const bool fits = found != sizes.end() && is_about(found->first, block.bytes);
    if (!fits && found != sizes.begin()) --found;
    if (found == sizes.end() || !is_about(found->first, block.bytes)) return StepAllocation::kNever;
    const uint32_t died = found->second;
    sizes.erase(found);
    return died;
  }

 private:
  std::map<Origin, std::multimap<int64_t, uint32_t>> by_origin_;
};

/// Where in one step that was reached which happens at a position of another step like it: after as many allocations.
class MatchedPositions {
 public:
  MatchedPositions(const StepAllocations& from, const StepAllocations& to) : from_(births(from)), to_(births(to)) {}
  uint32_t of(uint32_t position) const {
    const auto before = std::lower_bound(from_.begin(), from_.end(), position) - from_.begin();
    if (before == 0 || to_.empty()) return 0;
    return to_[std::min(static_cast<size_t>(before), to_.size()) - 1] + 1;
  }

 private:
  static std::vector<uint32_t> births(const StepAllocations& step_allocations) {
    std::vector<uint32_t> births;
    for (const StepAllocation& block : step_allocations.blocks) {
      if (block.is_of_step()) births.push_back(block.born);
    }
    return births;
  }
  std::vector<uint32_t> from_, to_;
};

bool records_graph(const StepAllocations& step_allocations) {
  return std::any_of(step_allocations.blocks.begin(), step_allocations.blocks.end(),
                     [](const StepAllocation& block) { return block.is_of_step() && block.in_graph; });
}

/// The sizes of what a step makes, by where it makes them in any phase.
class MadeSizes {
 public:
  explicit MadeSizes(const StepAllocations& step) {
    for (const StepAllocation& block : step.blocks) {
      if (block.is_of_step()) sizes_[key_of(block)].insert(block.bytes);
    }
  }
  /// Whether the step makes a block like this one.
  bool contain(const StepAllocation& block) const {
    const auto found = sizes_.find(key_of(block));
    if (found == sizes_.end()) return false;
    const std::set<int64_t>& sizes = found->second;
    const auto next = sizes.lower_bound(block.bytes);  // the nearest sizes are the likest
    return (next != sizes.end() && is_about(*next, block.bytes)) ||
           (next != sizes.begin() && is_about(*std::prev(next), block.bytes));
  }

 private:
  using Key = std::tuple<std::string_view, std::string_view, std::string_view>;
  static Key key_of(const StepAllocation& block) { return {block.made.op, block.made.source, block.made.module}; }

  std::map<Key, std::set<int64_t>> sizes_;
};

}  // namespace

bool is_like(const StepAllocations& cut, const StepAllocations& whole) {
  if (whole.step == 0 || cut.blocks.empty()) return false;
  if (records_graph(cut) && !records_graph(whole)) return false;  // evaluation before training
  Sizes sizes(whole);
  int64_t all = 0, missing = 0;
  bool request_is_there = true;
  for (const StepAllocation& block : cut.blocks) {
    const bool there = !is_compared(block) || sizes.take(block);
    all += block.bytes;
    missing += there ? 0 : block.bytes;
    request_is_there = there;  // the last one is the failed request
  }
  return request_is_there && missing * 20 <= all;
}

StepAllocations run_on(const StepAllocations& cut, const StepAllocations& whole) {
  const MatchedPositions positions(cut, whole);
  Lifetimes in_whole(whole), in_cut(cut);
  const MadeSizes made(cut);
  const uint32_t failed = positions.of(StepAllocation::kNever);
  const uint32_t backward = find_backward(whole.blocks);
  const bool may_be_zeroed = find_backward(cut.blocks) == StepAllocation::kNever;
  StepAllocations result{.step = cut.step, .blocks = whole.blocks};
  Allocations left;
  for (StepAllocation& block : result.blocks) {
    if (block.died != StepAllocation::kNever) continue;
    const uint32_t freed = in_cut.take(block);
    const bool lives_on = freed == StepAllocation::kNever;
    if (!block.is_of_step()) {
      // The first batch is made before the first step begins, the second one inside of its own.
      if (!lives_on && !made.contain(block)) block.died = positions.of(freed);
      continue;
    }
    if (in_whole.take(block) != StepAllocation::kNever) continue;  // the one before it is there already
    if (lives_on && traits_of(block.category).is_made_once) {
      block.born = StepAllocation::kBefore;
      continue;
    }
    StepAllocation& old = left.emplace_back(block);
    old.born = StepAllocation::kBefore;
    old.died = std::max(block.born + 1, failed);
    if (!lives_on) old.died = positions.of(freed);
    if (!lives_on || block.category != Category::gradient) continue;
    old.died = may_be_zeroed ? backward : StepAllocation::kNever;
    if (!may_be_zeroed) block.died = block.born + 1;  // it is added to the old one
  }
  result.blocks.insert(result.blocks.begin(), left.begin(), left.end());
  std::stable_sort(result.blocks.begin(), result.blocks.end(),
                   [](const StepAllocation& a, const StepAllocation& b) { return a.born < b.born; });
  return result;
}

}  // namespace oomdiag
