#include "profiler/replay/walks.h"

#include <map>

#include "profiler/replay/outline.h"

namespace oomdiag {
namespace {

bool makes_forward_nodes(const Trace& trace, const Event& event) {
  return event.kind == EventKind::nodes_created && !in_backward(trace, event);
}

// The first walks from `from` on, up to where the next forward pass begins. A backward pass that begins without is not
// walked.
Window walks_after(const Trace& trace, uint64_t from, uint64_t limit) {
  Window window;
  for (auto at = trace.events.from(from); at.index() < limit && at != trace.events.end(); ++at) {
    const Event& event = *at;
    const uint64_t i = at.index();
    if (window.empty() && event.kind == EventKind::alloc && in_backward(trace, event)) return {};
    if (window.empty() && event.kind == EventKind::graph_begin) window = {i, limit};
    if (!window.empty() && makes_forward_nodes(trace, event)) return {window.begin, i};
  }
  return window;
}

// The walks between the last forward pass before `end` and `end`.
Window walks_before(const Trace& trace, uint64_t end) {
  Window window{end, end};
  for (uint64_t i = end; i-- > 0;) {
    const Event event = trace.events[i];
    if (makes_forward_nodes(trace, event)) break;
    if (event.kind == EventKind::graph_begin) window.begin = i;
  }
  return window;
}

}  // namespace

Window find_walks(const Trace& trace, const Instant& instant) {
  Window own{instant.description_end, instant.description_end};
  for (auto at = trace.events.from(instant.event); at.index() < instant.description_end; ++at) {
    if (at == trace.events.end()) break;
    if (at->kind == EventKind::graph_begin && own.empty()) own.begin = at.index();
  }
  if (!own.empty()) return own;
  if (instant.phase == Phase::optimizer) return {};
  if (instant.phase == Phase::backward) return walks_before(trace, instant.event);
  return walks_after(trace, instant.event, trace.events.size());
}

Window find_earlier_walks(const Trace& trace, const Instant& instant) {
  if (instant.phase != Phase::forward && instant.phase != Phase::backward) return {};
  for (uint64_t i = instant.event; i-- > 0;) {
    if (trace.events[i].kind == EventKind::graph_begin) {
      Window window = walks_after(trace, i, instant.event);
      window.begin = walks_before(trace, i + 1).begin;
      return window;
    }
  }
  return {};
}

std::vector<std::vector<uint64_t>> saved_alike(const Trace& trace, const Window& walks, const Instant& instant,
                                               std::span<const Block> blocks) {
  std::vector<std::vector<uint64_t>> savers(blocks.size());
  std::map<uint32_t, size_t> young;  // by alloc event
  for (size_t b = 0; b < blocks.size(); ++b) {
    if ((blocks[b].event & Block::kInitial) == 0 && blocks[b].event >= walks.end) young[blocks[b].event] = b;
  }
  std::map<Likeness, std::vector<uint64_t>> saved;
  AddressMap<Likeness> alive;
  AllocCounter counter;
  for (auto at = trace.events.begin(); at.index() < instant.state_end; ++at) {
    const Event& event = *at;
    const uint64_t i = at.index();
    if (event.device != instant.device) continue;
    if (event.kind == EventKind::alloc) {
      const Likeness likeness{event.context, event.bytes, counter.count(event)};
      if (i < walks.end) alive[event.address] = likeness;
      const auto block = i < walks.end ? young.end() : young.find(static_cast<uint32_t>(i));
      if (block == young.end()) continue;
      if (const auto like = saved.find(likeness); like != saved.end()) savers[block->second] = like->second;
    } else if (event.kind == EventKind::saved_tensor && walks.contains(i)) {
      if (const Likeness* maker = alive.find(event.address)) saved[*maker].push_back(i);
    }
  }
  return savers;
}

}  // namespace oomdiag
