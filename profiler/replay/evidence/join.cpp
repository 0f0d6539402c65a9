#include "profiler/replay/evidence/join.h"

#include <algorithm>

#include "profiler/event.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

void NodeTable::add(const Event& nodes_created) {
  if (nodes_created.bytes <= 0 || nodes_created.node_sequence >= kNoNode) return;
  const uint64_t first = nodes_created.node_sequence;
  const uint64_t left = std::min<uint64_t>(kNoNode - first, ~uint32_t{0});
  const auto count = static_cast<uint32_t>(std::min(static_cast<uint64_t>(nodes_created.bytes), left));

  Made made{.context = nodes_created.context};
  if (nodes_created.address != 0) {
    const auto outer = find(static_cast<uint16_t>(nodes_created.detail), nodes_created.address - 1);
    if (outer) made.within = outer->within != 0 ? outer->within : outer->context;
  }
  NodesOfThread& nodes = threads_[nodes_created.node_thread];
  auto& ranges = nodes.ranges;
  while (!ranges.empty() && ranges.back().first >= first) ranges.pop_back();
  while (!nodes.within.empty() && nodes.within.back().first >= first) nodes.within.pop_back();
  if (!ranges.empty()) {
    Range& last = ranges.back();
    last.count = static_cast<uint32_t>(std::min<uint64_t>(last.count, first - last.first));
    if (nodes.made_in(last) == made && last.first + last.count == first && last.count < (1u << 30)) {
      last.count += std::min(count, 1u << 30);
      return;
    }
  }
  ranges.push_back({first, count, made.context});
  if (made.within != 0) nodes.within.emplace_back(first, made.within);
}

NodeTable::Made NodeTable::NodesOfThread::made_in(const Range& range) const {
  const auto found = std::lower_bound(within.begin(), within.end(), std::pair(range.first, uint32_t{0}));
  const bool is_known = found != within.end() && found->first == range.first;
  return {.context = range.context, .within = is_known ? found->second : 0};
}

std::optional<NodeTable::Made> NodeTable::find(uint16_t thread, uint64_t node_sequence) const {
  const auto found = threads_.find(thread);
  if (found == threads_.end()) return {};
  const auto& ranges = found->second.ranges;
  // Mostly a node of the newest step is asked for: the search begins at the end and goes back in ever wider steps.
  size_t width = 64;
  while (width < ranges.size() && ranges[ranges.size() - width].first > node_sequence) width *= 4;
  const auto begin = ranges.end() - static_cast<std::ptrdiff_t>(std::min(width, ranges.size()));
  const auto after = std::upper_bound(begin, ranges.end(), node_sequence,
                                      [](uint64_t sequence, const Range& range) { return sequence < range.first; });
  if (after == ranges.begin()) return {};
  const Range& range = *std::prev(after);
  if (node_sequence - range.first >= range.count) return {};
  return found->second.made_in(range);
}

namespace {

std::string_view autocast_of(const Context& context) {
  if ((context.flags & kAutocastBfloat16) != 0) return "bfloat16";
  return (context.flags & kAutocastFloat16) != 0 ? "float16" : "";
}

}  // namespace

Context find_place(const Trace& trace, const std::optional<NodeTable::Made>& made, const Event& event) {
  Context place = trace.context(event.context);
  if (!made) return place;
  const Context& forward = trace.context(made->context);
  const bool runs_again = (place.flags & kRecomputation) != 0 && place.op != 0;
  if (!runs_again) place.op = forward.op;
  if (!runs_again) place.flags = forward.flags;
  if (!runs_again || place.module == 0) place.module = forward.module;
  if (!runs_again || place.source == 0) {
    place.source = forward.source;
    place.inner_source = forward.inner_source;
  }
  if (place.source == 0) place.source = trace.context(made->within).source;
  return place;
}

Where locate(const Trace& trace, const NodeTable& nodes, const Event& event) {
  const auto made = in_node(event) ? nodes.find(event.node_thread, event.node_sequence) : std::nullopt;
  const Context place = find_place(trace, made, event);
  return {.node = trace.name(place.node),
          .op = trace.name(place.op),
          .inner = trace.name(place.inner),
          .module = trace.name(place.module),
          .source = trace.name(place.source),
          .inner_source = trace.name(place.inner_source),
          .autocast = autocast_of(place)};
}

}  // namespace oomdiag
