#include "profiler/snapshot/compare.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <string_view>

#include "profiler/event.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/evidence/categories.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/snapshot/actions.h"
#include "profiler/snapshot/align.h"
#include "profiler/snapshot/window.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

constexpr size_t kMaxDifferences = 10;
constexpr size_t kMaxLookedAt = 1 << 12;  // differences, to find what explains them

/// Both halves of a free are compared as one.
std::string_view word_for(EventKind kind) { return kind == EventKind::free_requested ? "free" : action_of(kind); }

bool is_of_segment(EventKind kind) {
  return kind == EventKind::segment_alloc || kind == EventKind::segment_free || kind == EventKind::segment_map ||
         kind == EventKind::segment_unmap;
}

/// One side: the elements to align, and which events of the trace they are.
struct Side {
  std::vector<uint64_t> elements;  ///< bytes and kind
  std::vector<uint32_t> events;
};

/// The events of a trace that are compared.
struct Range {
  uint64_t begin = 0, end = ~uint64_t{0};
};

Side read_side(const Trace& trace, const Range& range, uint8_t device, bool (*is_compared)(EventKind)) {
  Side side;
  for (auto at = trace.events.from(range.begin); at != trace.events.end() && at.index() < range.end; ++at) {
    if (at->device != device || !is_compared(at->kind)) continue;
    side.elements.push_back(static_cast<uint64_t>(at->bytes) << 4 | (static_cast<uint64_t>(at->kind) & 15));
    side.events.push_back(static_cast<uint32_t>(at.index()));
  }
  return side;
}

std::string describe(const Where& where) {
  std::string text;
  for (const std::string_view part : {where.node, where.op, where.module, where.source}) {
    if (part.empty()) continue;
    text += (text.empty() ? "" : ", ") + std::string(part);
  }
  return text;
}

/// Finds where events of one trace happened. They must be asked for in order.
class Locator {
 public:
  explicit Locator(const Trace& trace) : trace_(trace), at_(trace.events.begin()) {}

  ComparedEvent look_at(const Side& side, size_t number) {
    for (; at_.index() < side.events[number]; ++at_) {
      if (at_->kind == EventKind::nodes_created) nodes_.add(*at_);
    }
    return {.number = number + 1,
            .what = std::string(word_for(at_->kind)),
            .bytes = at_->bytes,
            .where = describe(locate(trace_, nodes_, *at_))};
  }

 private:
  const Trace& trace_;
  EventLog::Iterator at_;
  NodeTable nodes_;
};

/// What versions of PyTorch were seen to do differently, and how an allocation that only one of them makes shows it.
struct VersionDifference {
  std::string_view what;
  bool (*explains)(const ComparedEvent& alloc);
};
constexpr std::array kVersionDifferences = {
    VersionDifference{
        "cuBLAS workspaces, which PyTorch takes for each product since 2.15 and kept for each stream before",
        [](const ComparedEvent& alloc) { return is_cublas_workspace(alloc.bytes, 0); }},
    VersionDifference{"aten::slice_backward of whole slices, which PyTorch 2.6 allocates and 2.11 does not",
                      [](const ComparedEvent& alloc) {
                        return alloc.where.find("slice_backward") != std::string::npos ||
                               alloc.where.find("SliceBackward") != std::string::npos;
                      }},
};

/// The one that explains every allocation that only one side has; frees follow from allocations.
std::string_view find_version_difference(std::span<const Difference> all) {
  for (const VersionDifference& known : kVersionDifferences) {
    uint64_t explained = 0;
    const bool holds = std::ranges::all_of(all, [&](const Difference& one) {
      if (!one.left.what.empty() && !one.right.what.empty()) return false;
      const ComparedEvent& event = one.left.what.empty() ? one.right : one.left;
      if (event.what != word_for(EventKind::alloc)) return true;
      return known.explains(event) && ++explained > 0;
    });
    if (holds && explained > 0) return known.what;
  }
  return {};
}

/// Two recordings, and what of them is compared.
struct Sides {
  const Trace &left, &right;
  Range left_range{}, right_range{};
  bool left_goes_on = false, right_goes_on = false;  ///< after the other was taken
};

ComparedSequence compare_sequence(const Sides& sides, uint8_t device, bool (*is_compared)(EventKind)) {
  const Side a = read_side(sides.left, sides.left_range, device, is_compared);
  const Side b = read_side(sides.right, sides.right_range, device, is_compared);
  Alignment found = align(a.elements, b.elements, kMaxLookedAt);
  ComparedSequence result{
      .equal = found.equal, .changed = found.changed, .only_left = found.only_left, .only_right = found.only_right};
  (sides.left_goes_on ? result.left_rest : result.only_left) += found.left_rest;
  (sides.right_goes_on ? result.right_rest : result.only_right) += found.right_rest;
  result.left_events = a.elements.size() - result.left_rest;
  result.right_events = b.elements.size() - result.right_rest;

  const auto add_rest = [&](Gap::Kind kind, uint64_t rest, size_t left_at, size_t right_at) {
    const bool counted = kind == Gap::Kind::only_left ? !sides.left_goes_on : !sides.right_goes_on;
    if (counted && rest > 0 && found.first.size() < kMaxLookedAt) found.first.push_back({kind, left_at, right_at});
  };
  add_rest(Gap::Kind::only_left, found.left_rest, a.elements.size() - found.left_rest, b.elements.size());
  add_rest(Gap::Kind::only_right, found.right_rest, a.elements.size(), b.elements.size() - found.right_rest);

  Locator on_the_left(sides.left), on_the_right(sides.right);
  for (const Gap& gap : found.first) {
    Difference& difference = result.first.emplace_back();
    if (gap.kind != Gap::Kind::only_right) difference.left = on_the_left.look_at(a, gap.left);
    if (gap.kind != Gap::Kind::only_left) difference.right = on_the_right.look_at(b, gap.right);
  }
  if (result.first.size() < kMaxLookedAt) result.version_difference = find_version_difference(result.first);
  if (result.first.size() > kMaxDifferences) result.first.resize(kMaxDifferences);
  return result;
}

/// Whether one has the allocs of the other, which may go on.
bool have_equal_allocs(const Sides& sides, uint8_t device) {
  const auto is_alloc = [](EventKind kind) { return kind == EventKind::alloc; };
  const Side a = read_side(sides.left, sides.left_range, device, is_alloc);
  const Side b = read_side(sides.right, sides.right_range, device, is_alloc);
  const auto [left, right] = std::ranges::mismatch(a.elements, b.elements);
  const bool left_ends = left == a.elements.end(), right_ends = right == b.elements.end();
  return (left_ends && right_ends) || (left_ends && sides.right_goes_on) || (right_ends && sides.left_goes_on);
}

/// Where the range ends of which so many allocs and frees are compared.
void cut(const Trace& trace, Range& range, uint8_t device, uint64_t blocks_compared) {
  uint64_t seen = 0;
  for (auto at = trace.events.from(range.begin); at != trace.events.end(); ++at) {
    if (at->device != device || !is_of_block(at->kind)) continue;
    if (seen++ < blocks_compared) continue;
    range.end = at.index();
    return;
  }
}

void read_peaks(const Trace& trace, const Range& range, uint8_t device, int64_t& peak, int64_t& reserved) {
  Blocks blocks(parse_allocator_settings(trace.process.allocator_settings));
  blocks.start_from(trace.initial, trace.initial_layout, device);
  const auto note = [&] {
    peak = std::max(peak, blocks.allocated_bytes());
    reserved = std::max(reserved, blocks.reserved_bytes());
  };
  for (auto at = trace.events.begin(); at != trace.events.end() && at.index() < range.end; ++at) {
    if (at.index() == range.begin) note();
    if (at->device != device) continue;
    blocks.apply(*at);
    if (at.index() >= range.begin) note();
  }
}

// The allocator makes or frees a segment before it reports the block: what `part` has of segments before its first
// block stands before the window, too.
uint64_t with_segments_before(const Trace& part, const Trace& whole, uint64_t first_event, uint8_t device) {
  uint64_t segments_left = 0;
  for (auto at = part.events.begin(); at != part.events.end(); ++at) {
    if (at->device != device) continue;
    if (is_of_block(at->kind)) break;
    segments_left += is_of_segment(at->kind) ? 1 : 0;
  }
  uint64_t begin = first_event;
  for (uint64_t i = first_event; i-- > 0 && segments_left > 0;) {
    const Event event = whole.events[i];
    if (event.device != device) continue;
    if (is_of_block(event.kind)) break;
    if (!is_of_segment(event.kind)) continue;
    begin = i;
    --segments_left;
  }
  return begin;
}

bool within(int64_t left, int64_t right, double share) {
  return static_cast<double>(std::abs(left - right)) <= share * static_cast<double>(std::max(left, right));
}

/// A snapshot with blocks in use before its first event began in the middle; where both do, the shorter one of two.
bool may_be_window(const Trace& part, const Trace& whole) {
  if (!part.process.snapshot || part.initial.empty()) return false;
  return whole.initial.empty() || part.events.size() <= whole.events.size();
}

}  // namespace

double ComparedSequence::equal_percent() const {
  const uint64_t longer = std::max(left_events, right_events);
  if (longer == 0) return 100;
  return std::floor(static_cast<double>(equal) / static_cast<double>(longer) * 1e5) / 1e3;
}

bool Comparison::reserved_agrees() const {
  return within(left_reserved_bytes, right_reserved_bytes, kReservedTolerance);
}

bool Comparison::is_same_program() const {
  constexpr double kEqual = 98, kPaired = 98, kLeastEqual = 90, kPeaks = 0.01;
  if (blocks.equal == 0) return false;
  if (blocks.equal_percent() >= kEqual) return true;
  const double paired = 100.0 * static_cast<double>(blocks.equal + blocks.changed) /
                        static_cast<double>(std::max(blocks.left_events, blocks.right_events));
  const auto apart = static_cast<double>(std::abs(left_peak_bytes - right_peak_bytes));
  return blocks.equal_percent() >= kLeastEqual && paired >= kPaired &&
         apart <= kPeaks * static_cast<double>(left_peak_bytes);
}

bool Comparison::peak_agrees() const {
  return within(left_peak_bytes, right_peak_bytes, sizes_are_guessed ? kPeakTolerance : 0);
}

Comparison compare(const Trace& left, const Trace& right, uint8_t device) {
  Comparison result;
  // A trace goes on to the end of the program, a snapshot to where it was taken.
  Sides sides{left, right};
  sides.left_goes_on = right.process.snapshot && !left.process.snapshot;
  sides.right_goes_on = left.process.snapshot && !right.process.snapshot;
  result.left_begins_late = may_be_window(left, right);
  if (result.left_begins_late) {
    result.window = find_window(left, right, device);
  } else if (may_be_window(right, left)) {
    result.window = find_window(right, left, device);
  }
  if (result.window) {
    const uint64_t begin =
        with_segments_before(result.left_begins_late ? left : right, result.left_begins_late ? right : left,
                             result.window->first_event, device);
    (result.left_begins_late ? sides.right_range : sides.left_range).begin = begin;
    (result.left_begins_late ? sides.right_goes_on : sides.left_goes_on) = true;
  }
  result.sizes_are_guessed = !left.initial.empty() || !right.initial.empty();
  result.blocks = compare_sequence(sides, device, is_of_block);
  result.only_frees_differ = !result.blocks.is_equal() && have_equal_allocs(sides, device);
  if (result.blocks.left_rest > 0) cut(left, sides.left_range, device, result.blocks.left_events);
  if (result.blocks.right_rest > 0) cut(right, sides.right_range, device, result.blocks.right_events);
  result.segments = compare_sequence(sides, device, is_of_segment);
  read_peaks(left, sides.left_range, device, result.left_peak_bytes, result.left_reserved_bytes);
  read_peaks(right, sides.right_range, device, result.right_peak_bytes, result.right_reserved_bytes);
  return result;
}

}  // namespace oomdiag
