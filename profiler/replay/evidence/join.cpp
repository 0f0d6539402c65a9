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
    const Made* outer = find(static_cast<uint16_t>(nodes_created.detail), nodes_created.address - 1);
    if (outer != nullptr) made.within = outer->within != 0 ? outer->within : outer->context;
  }
  auto& ranges = threads_[nodes_created.node_thread];
  while (!ranges.empty() && ranges.back().first >= first) ranges.pop_back();
  if (!ranges.empty()) {
    Range& last = ranges.back();
    last.count = static_cast<uint32_t>(std::min<uint64_t>(last.count, first - last.first));
    if (last.made == made && last.first + last.count == first && last.count < (1u << 30)) {
      last.count += std::min(count, 1u << 30);
      return;
    }
  }
  ranges.push_back({first, count, made});
}

const NodeTable::Made* NodeTable::find(uint16_t thread, uint64_t node_sequence) const {
  const auto found = threads_.find(thread);
  if (found == threads_.end()) return nullptr;
  const auto& ranges = found->second;
  // Mostly a node of the newest step is asked for: the search begins at the end and goes back in ever wider steps.
  size_t width = 64;
  while (width < ranges.size() && ranges[ranges.size() - width].first > node_sequence) width *= 4;
  const auto begin = ranges.end() - static_cast<std::ptrdiff_t>(std::min(width, ranges.size()));
  const auto after = std::upper_bound(begin, ranges.end(), node_sequence,
                                      [](uint64_t sequence, const Range& range) { return sequence < range.first; });
  if (after == ranges.begin()) return nullptr;
  const Range& range = *std::prev(after);
  return node_sequence - range.first < range.count ? &range.made : nullptr;
}

namespace {

std::string_view autocast_of(const Context& context) {
  if ((context.flags & kAutocastBfloat16) != 0) return "bfloat16";
  return (context.flags & kAutocastFloat16) != 0 ? "float16" : "";
}

}  // namespace

Where locate(const Trace& trace, const NodeTable& nodes, const Event& event) {
  return locate(trace, in_node(event) ? nodes.find(event.node_thread, event.node_sequence) : nullptr, event);
}

Where locate(const Trace& trace, const NodeTable::Made* made, const Event& event) {
  const Context& own = trace.context(event.context);
  Where where{.node = trace.name(own.node),
              .op = trace.name(own.op),
              .inner = trace.name(own.inner),
              .module = trace.name(own.module),
              .source = trace.name(own.source),
              .inner_source = trace.name(own.inner_source),
              .autocast = autocast_of(own)};
  if (made == nullptr) return where;
  const Context& forward = trace.context(made->context);
  const bool runs_again = (own.flags & kRecomputation) != 0 && own.op != 0;
  if (!runs_again) where.op = trace.name(forward.op);
  if (!runs_again) where.autocast = autocast_of(forward);
  if (!runs_again || own.module == 0) where.module = trace.name(forward.module);
  if (!runs_again || own.source == 0) {
    where.source = trace.name(forward.source);
    where.inner_source = trace.name(forward.inner_source);
  }
  if (where.source.empty()) where.source = trace.name(trace.context(made->within).source);
  return where;
}

}  // namespace oomdiag
