#include "profiler/snapshot/compare.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "profiler/replay/join.h"
#include "profiler/replay/replay.h"

namespace oomdiag {
namespace {

constexpr size_t kMostDifferences = 10;

const char* word_for(EventKind kind) {
  if (kind == EventKind::alloc) return "alloc";
  if (kind == EventKind::free_requested) return "free";
  if (kind == EventKind::segment_alloc) return "segment_alloc";
  if (kind == EventKind::segment_free) return "segment_free";
  if (kind == EventKind::segment_map) return "segment_map";
  return "segment_unmap";
}

bool is_of_block(EventKind kind) { return kind == EventKind::alloc || kind == EventKind::free_requested; }
bool is_of_segment(EventKind kind) {
  return kind == EventKind::segment_alloc || kind == EventKind::segment_free || kind == EventKind::segment_map ||
         kind == EventKind::segment_unmap;
}

/// One side: the elements to align, and which events of the trace they are.
struct Side {
  std::vector<uint64_t> elements;  ///< bytes and kind
  std::vector<uint32_t> events;
};

Side read_side(const Trace& trace, uint8_t device, bool (*wanted)(EventKind)) {
  Side side;
  for (auto at = trace.events.begin(); at != trace.events.end(); ++at) {
    if (at->device != device || !wanted(at->kind)) continue;
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

/// Tells where events of one trace happened. They must be asked for in order.
class Locator {
 public:
  explicit Locator(const Trace& trace) : trace_(trace), at_(trace.events.begin()) {}

  ComparedEvent look_at(const Side& side, size_t number) {
    for (; at_.index() < side.events[number]; ++at_) {
      if (at_->kind == EventKind::nodes_created) nodes_.add(*at_);
    }
    return {.number = number + 1,
            .what = word_for(at_->kind),
            .bytes = at_->bytes,
            .where = describe(locate(trace_, nodes_, *at_))};
  }

 private:
  const Trace& trace_;
  EventLog::Iterator at_;
  NodeTable nodes_;
};

ComparedSequence compare_sequence(const Trace& left, const Trace& right, uint8_t device, bool (*wanted)(EventKind)) {
  const Side a = read_side(left, device, wanted), b = read_side(right, device, wanted);
  Alignment found = align(a.elements, b.elements, kMostDifferences);
  ComparedSequence result{
      .equal = found.equal, .changed = found.changed, .only_left = found.only_left, .only_right = found.only_right};
  // A trace goes on to the end of the program, a snapshot to where it was taken.
  const bool left_goes_on = right.process.snapshot && !left.process.snapshot;
  const bool right_goes_on = left.process.snapshot && !right.process.snapshot;
  (left_goes_on ? result.left_rest : result.only_left) += found.left_rest;
  (right_goes_on ? result.right_rest : result.only_right) += found.right_rest;
  result.left_events = a.elements.size() - result.left_rest;
  result.right_events = b.elements.size() - result.right_rest;

  const auto add_rest = [&](Gap::Kind kind, uint64_t rest, size_t left_at, size_t right_at) {
    const bool counted = kind == Gap::Kind::only_left ? !left_goes_on : !right_goes_on;
    if (counted && rest > 0 && found.first.size() < kMostDifferences) found.first.push_back({kind, left_at, right_at});
  };
  add_rest(Gap::Kind::only_left, found.left_rest, a.elements.size() - found.left_rest, b.elements.size());
  add_rest(Gap::Kind::only_right, found.right_rest, a.elements.size(), b.elements.size() - found.right_rest);

  Locator on_the_left(left), on_the_right(right);
  for (const Gap& gap : found.first) {
    Difference& difference = result.first.emplace_back();
    if (gap.kind != Gap::Kind::only_right) difference.left = on_the_left.look_at(a, gap.left);
    if (gap.kind != Gap::Kind::only_left) difference.right = on_the_right.look_at(b, gap.right);
  }
  return result;
}

/// `trace` up to where the other side was taken, a snapshot.
Trace until(const Trace& trace, uint8_t device, uint64_t blocks_compared) {
  uint64_t seen = 0;
  for (auto at = trace.events.begin(); at != trace.events.end(); ++at) {
    if (at->device != device || !is_of_block(at->kind)) continue;
    if (seen++ < blocks_compared) continue;
    Trace cut = trace;
    cut.events = trace.events.first(at.index());
    return cut;
  }
  return trace;
}

void read_peaks(const Trace& trace, uint8_t device, int64_t& peak, int64_t& reserved) {
  for (const DeviceHistory& card : replay(trace).devices) {
    if (card.index != device) continue;
    peak = card.peak.allocated_bytes;
    reserved = card.peak.reserved_bytes;
  }
}

}  // namespace

double ComparedSequence::equal_percent() const {
  const uint64_t longer = std::max(left_events, right_events);
  if (longer == 0) return 100;
  return std::floor(static_cast<double>(equal) / static_cast<double>(longer) * 1e5) / 1e3;
}

bool Comparison::reserved_agrees() const {
  const auto difference = static_cast<double>(std::abs(left_reserved_bytes - right_reserved_bytes));
  return difference <= kReservedTolerance * static_cast<double>(std::max(left_reserved_bytes, right_reserved_bytes));
}

Comparison compare(const Trace& left, const Trace& right, uint8_t device) {
  Comparison result;
  result.blocks = compare_sequence(left, right, device, is_of_block);
  const Trace left_cut = result.blocks.left_rest > 0 ? until(left, device, result.blocks.left_events) : left;
  const Trace right_cut = result.blocks.right_rest > 0 ? until(right, device, result.blocks.right_events) : right;
  result.segments = compare_sequence(left_cut, right_cut, device, is_of_segment);
  read_peaks(left_cut, device, result.left_peak_bytes, result.left_reserved_bytes);
  read_peaks(right_cut, device, result.right_peak_bytes, result.right_reserved_bytes);
  return result;
}

}  // namespace oomdiag
