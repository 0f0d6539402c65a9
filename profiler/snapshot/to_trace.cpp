#include "profiler/snapshot/to_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "profiler/replay/rounding.h"
#include "profiler/snapshot/earlier_state.h"
#include "profiler/snapshot/steps.h"

namespace oomdiag {
namespace {

using Action = SnapshotEntry::Action;

EventKind kind_of(Action action) {
  switch (action) {
    case Action::alloc:
      return EventKind::alloc;
    case Action::free_requested:
      return EventKind::free_requested;
    case Action::free_completed:
      return EventKind::free_completed;
    case Action::segment_alloc:
      return EventKind::segment_alloc;
    case Action::segment_free:
      return EventKind::segment_free;
    case Action::segment_map:
      return EventKind::segment_map;
    case Action::segment_unmap:
      return EventKind::segment_unmap;
    case Action::oom:
      return EventKind::out_of_memory;
    case Action::other:
      return EventKind::none;
  }
  return EventKind::none;
}

uint64_t nanoseconds(int64_t time_us, int64_t start_us) {
  return static_cast<uint64_t>(std::max<int64_t>(0, time_us - start_us)) * 1000;
}

Event event_of(const SnapshotEntry& entry, int64_t start_us, uint8_t device) {
  return {.time = nanoseconds(entry.time_us, start_us),
          .address = entry.address,
          .bytes = entry.bytes,
          .detail = entry.stream,
          .context = entry.place,
          .thread = device,
          .kind = kind_of(entry.action),
          .device = device};
}

class Converter {
 public:
  explicit Converter(Snapshot snapshot)
      : snapshot_(std::move(snapshot)), settings_(parse_allocator_settings(snapshot_.allocator_settings)) {}

  Trace convert() {
    const size_t cards = count_cards();
    trace_.devices.resize(cards);
    trace_.process.snapshot = true;
    trace_.process.end_state = EndState::exited;
    trace_.process.allocator_settings = snapshot_.allocator_settings;
    trace_.names = snapshot_.names;
    for (const SnapshotPlace& place : snapshot_.places) {
      trace_.contexts.push_back({.op = place.op,
                                 .inner = place.op,
                                 .node = place.node,
                                 .source = place.source,
                                 .scope = place.scope,
                                 .inner_source = place.inner_source});
    }
    for (const auto& entries : snapshot_.traces) {
      if (!entries.empty()) start_us_ = std::min(start_us_, entries.front().time_us);
    }
    std::vector<Event> events;
    events.reserve(count_events());
    for (size_t card = 0; card < cards; ++card) add_card(card, events);
    const auto earlier = [](const Event& a, const Event& b) { return a.time < b.time; };
    if (cards > 1) std::stable_sort(events.begin(), events.end(), earlier);
    add_steps(events);
    if (const size_t odd = count_contradictions(); odd > 0) {
      add_note(fmt::format("{} of its segments overlap or hold blocks that do not fit into them", odd), events);
    }
    for (size_t i = 0; i < events.size(); ++i) events[i].sequence = i + 1;
    trace_.events = std::move(events);
    return std::move(trace_);
  }

 private:
  size_t count_cards() const {
    size_t cards = snapshot_.traces.size();
    while (cards > 0 && snapshot_.traces[cards - 1].empty()) --cards;
    for (const SnapshotSegment& segment : snapshot_.segments) {
      cards = std::max(cards, static_cast<size_t>(segment.device) + 1);
    }
    return std::min<size_t>(cards, kMaxDevices);
  }

  // At most: to grow step by step would take twice as much.
  size_t count_events() const {
    size_t count = 4 * snapshot_.annotations.size() + 64;
    for (const auto& entries : snapshot_.traces) count += entries.size();
    for (const SnapshotSegment& segment : snapshot_.segments) count += 2 * segment.blocks.size() + 2;
    return count;
  }

  void add_card(size_t card, std::vector<Event>& events) {
    std::span<const SnapshotEntry> entries;
    if (card < snapshot_.traces.size()) entries = snapshot_.traces[card];
    const auto device = static_cast<uint8_t>(card);
    EarlierState state(settings_, snapshot_.segments, static_cast<int>(card));
    const std::vector<Event> at_the_end = state.layout();
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) state.undo(*entry);
    const auto layout = state.layout(), blocks = state.blocks();
    trace_.initial_layout.insert(trace_.initial_layout.end(), layout.begin(), layout.end());
    trace_.initial.insert(trace_.initial.end(), blocks.begin(), blocks.end());

    int64_t reserved = 0;
    for (const Event& event : layout) reserved += event.kind == EventKind::segment_state ? event.bytes : 0;
    bool oom_is_last = false, any_oom = false;
    for (const SnapshotEntry& entry : entries) {
      if (entry.action == Action::other) continue;
      events.push_back(event_of(entry, start_us_, device));
      reserved += reserved_by(entry);
      oom_is_last = entry.action == Action::oom;
      any_oom |= oom_is_last;
      if (oom_is_last) add_stacks(entry, device, events);
      note_room(entry, reserved, trace_.devices[card]);
    }
    if (card < snapshot_.traces.size()) snapshot_.traces[card] = {};
    // What follows an OOM directly describes it: a snapshot taken right then has its segments. One that has none is
    // checked by them. But after an OOM was unwound they say nothing about it.
    if (events.empty() || (any_oom && !oom_is_last)) return;
    for (Event event : at_the_end) {
      event.time = events.back().time;
      event.thread = device;
      events.push_back(event);
    }
  }

  // Segments are sorted by card and address.
  size_t count_contradictions() const {
    size_t odd = 0;
    for (size_t i = 0; i < snapshot_.segments.size(); ++i) {
      const SnapshotSegment& segment = snapshot_.segments[i];
      const uint64_t end = segment.address + static_cast<uint64_t>(std::max<int64_t>(0, segment.bytes));
      const bool overlaps = i + 1 < snapshot_.segments.size() && snapshot_.segments[i + 1].device == segment.device &&
                            snapshot_.segments[i + 1].address < end;
      uint64_t at = segment.address;
      const bool fits = std::ranges::all_of(segment.blocks, [&](const SnapshotBlock& block) {
        const bool follows = block.address >= at;
        at = block.address + static_cast<uint64_t>(std::max<int64_t>(0, block.bytes));
        return follows && at <= end;
      });
      odd += overlaps || !fits ? 1 : 0;
    }
    return odd;
  }

  // Where a recorder would have left its own notes.
  void add_note(const std::string& text, std::vector<Event>& events) {
    trace_.names.emplace_back("snapshot");
    trace_.contexts.push_back({.op = static_cast<uint32_t>(trace_.names.size() - 1)});
    trace_.names.push_back(text);
    events.push_back({.time = events.empty() ? 0 : events.back().time,
                      .detail = trace_.names.size() - 1,
                      .context = static_cast<uint32_t>(trace_.contexts.size() - 1),
                      .kind = EventKind::note});
  }

  // As the recorder would have told them.
  void add_steps(std::vector<Event>& events) {
    std::vector<size_t> positions;
    for (const SnapshotAnnotation& one : snapshot_.annotations) {
      const uint64_t time = nanoseconds(one.time_us, start_us_);
      const auto after = std::upper_bound(events.begin(), events.end(), time,
                                          [](uint64_t t, const Event& event) { return t < event.time; });
      positions.push_back(static_cast<size_t>(after - events.begin()));
    }
    const SnapshotSteps steps = find_steps(events, snapshot_, positions);
    if (steps.begins.empty() && steps.ends.empty()) return;
    trace_.names.emplace_back("Optimizer.step");
    const uint64_t scope = trace_.names.size() - 1;
    // From the back, in place: there may be millions of events.
    size_t from = events.size(), to = from + steps.begins.size() + 2 * steps.ends.size();
    size_t begin = steps.begins.size(), end = steps.ends.size();
    events.resize(to);
    while (to > from) {
      const uint64_t time = from > 0 ? events[from - 1].time : 0;
      if (begin > 0 && steps.begins[begin - 1] == from) {
        events[--to] = {.time = time, .kind = EventKind::nodes_created};
        --begin;
      } else if (end > 0 && steps.ends[end - 1] == from) {
        events[--to] = {.time = time, .detail = scope, .kind = EventKind::scope_end};
        events[--to] = {.time = time, .detail = scope, .kind = EventKind::scope_begin};
        --end;
      } else {
        events[--to] = events[--from];
      }
    }
  }

  // The calls that led to the refusal.
  void add_stacks(const SnapshotEntry& oom, uint8_t device, std::vector<Event>& events) const {
    const SnapshotPlace& place = snapshot_.places[oom.place];
    Event stack{.time = events.back().time, .thread = device, .kind = EventKind::stack, .device = device};
    stack.detail = place.stack;
    if (place.stack != 0) events.push_back(stack);
    stack.detail = place.native_stack;
    stack.flags = kNativeStack;
    if (place.native_stack != 0) events.push_back(stack);
  }

  static int64_t reserved_by(const SnapshotEntry& entry) {
    const int64_t bytes = std::clamp<int64_t>(entry.bytes, 0, kMaxSaneBytes);
    if (entry.action == Action::segment_alloc || entry.action == Action::segment_map) return bytes;
    return entry.action == Action::segment_free || entry.action == Action::segment_unmap ? -bytes : 0;
  }

  // How large a card is no snapshot says; it has at least what was reserved, and at an OOM what was free besides.
  static void note_room(const SnapshotEntry& entry, int64_t reserved, Device& card) {
    const uint64_t free_bytes = entry.action == Action::oom ? entry.address : 0;
    const auto free = static_cast<int64_t>(std::min<uint64_t>(free_bytes, kMaxSaneBytes));
    card.total_bytes = std::max(card.total_bytes, std::clamp<int64_t>(reserved, 0, kMaxSaneBytes) + free);
  }

  Snapshot snapshot_;
  AllocatorSettings settings_;
  Trace trace_;
  int64_t start_us_ = INT64_MAX;
};

}  // namespace

Trace to_trace(Snapshot snapshot) { return Converter(std::move(snapshot)).convert(); }

}  // namespace oomdiag
