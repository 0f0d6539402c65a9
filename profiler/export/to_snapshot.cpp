#include "profiler/export/to_snapshot.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <string_view>
#include <vector>

#include "profiler/event.h"
#include "profiler/export/pickler.h"
#include "profiler/export/pieces.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/allocator/initial_layout.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/snapshot/actions.h"
#include "profiler/trace/stack_call.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

/// Frames of one kind of place are written once.
class Frames {
 public:
  Frames(Pickler& pickler, const Trace& trace) : pickler_(pickler) {
    const auto keep = [&](const Event& event) {
      if (event.kind != EventKind::stack || event.address == 0 || (event.flags & kNativeStack) != 0) return;
      stacks_.emplace(trace.name(event.address), trace.name(event.detail));
    };
    for (const Event& event : trace.kept) keep(event);
    for (const Event& event : trace.events) keep(event);
  }

  /// `scope`: that PyTorch opened, or empty.
  void write(const Where& where, std::string_view scope = {}) {
    const auto [known, fresh] =
        numbers_.try_emplace(Key{where.node, where.op, where.module, where.source, where.inner_source, scope});
    if (!fresh) return pickler_.recall(known->second);
    pickler_.begin_list();
    if (!where.node.empty()) frame(where.node, "autograd", 0);
    if (!where.op.empty()) frame(where.op, "op", 0);
    if (!where.module.empty()) frame(where.module, "module", 0);
    if (!scope.empty()) frame(scope, "scope", 0);
    const auto stack = stacks_.find(where.source);
    if (stack == stacks_.end() || stack->second.find(where.inner_source) == std::string_view::npos) {
      line(where.inner_source, "line");
    }
    if (stack == stacks_.end())
      line(where.source, "line");
    else
      calls(stack->second);
    pickler_.end_list();
    known->second = pickler_.remember();
  }

 private:
  using Key = std::array<std::string_view, 6>;

  void frame(std::string_view name, std::string_view file, int64_t number) {
    pickler_.begin_dict();
    pickler_.item("name", name);
    pickler_.item("filename", file);
    pickler_.item("line", number);
    pickler_.end_dict();
  }
  /// "train.py:31 in step" in each line.
  void calls(std::string_view stack) {
    for (const StackCall& call : parse_stack(stack)) line(call.place, call.function.empty() ? "line" : call.function);
  }
  void line(std::string_view source, std::string_view function) {
    if (source.empty()) return;
    const size_t colon = source.rfind(':');
    int64_t number = 0;
    if (colon != source.npos) std::from_chars(source.data() + colon + 1, source.data() + source.size(), number);
    frame(function, source.substr(0, colon), number);
  }

  Pickler& pickler_;
  std::map<Key, uint32_t> numbers_;
  std::map<std::string_view, std::string_view> stacks_;  ///< of lines
};

/// The state of a device that a snapshot shows, and the last event of its history.
struct ShownState {
  std::vector<SegmentLayout> segments;
  std::vector<LiveBlock> blocks;
  uint64_t events = 0;
};

ShownState described_state(const Trace& trace, const DeviceHistory& device) {
  const bool before_all = device.peak.at_start && !device.failure;
  const uint64_t last = std::min<uint64_t>(device.state.event + 1, trace.events.size());
  return {device.state.segments, device.state.blocks, before_all ? 0 : last};
}

ShownState final_state(const Trace& trace, const DeviceHistory& device) {
  const auto index = static_cast<uint8_t>(device.index);
  Blocks blocks(parse_allocator_settings(trace.process.allocator_settings));
  blocks.start_from(trace.initial, trace.initial_layout, index);
  NodeTable nodes;
  std::map<uint64_t, Where> places;
  for (auto at = trace.events.begin(); at != trace.events.end(); ++at) {
    if (at->kind == EventKind::nodes_created) nodes.add(*at);
    if (at->device != index) continue;
    const bool before = at->kind == EventKind::segment_state && (at->flags & kBeforeRecording) != 0;
    if (before) blocks.adopt(find_initial_layout(trace.events, at.index()), index);
    if (action_of(at->kind).empty()) continue;
    blocks.apply(*at, static_cast<uint32_t>(at.index()));
    if (at->kind == EventKind::alloc) places[at->address] = locate(trace, nodes, *at);
  }
  ShownState state;
  state.events = trace.events.size();
  for (const auto& segment : blocks.by_segment()) state.segments.push_back(lay_out(segment));
  for (const Block& block : blocks.in_use()) {
    LiveBlock& live = state.blocks.emplace_back();
    live.address = block.address;
    live.bytes = block.bytes;
    live.requested_bytes = block.requested_bytes;
    live.pending_free = block.state == Block::State::pending_free;
    const bool initial = block.tag != Block::kNone && (block.tag & Block::kInitial) != 0;
    if (initial)
      live.made = locate(trace, nodes, trace.initial[block.tag & ~Block::kInitial]);
    else if (const auto place = places.find(block.address); place != places.end())
      live.made = place->second;
  }
  return state;
}

class SnapshotWriter {
 public:
  SnapshotWriter(const Trace& trace, const History& history, SnapshotTime time)
      : trace_(trace), history_(history), frames_(pickler_, trace) {
    for (const DeviceHistory& device : history.devices) {
      states_.push_back(time == SnapshotTime::end ? final_state(trace, device) : described_state(trace, device));
    }
  }

  std::string write() {
    pickler_.begin_dict();
    pickler_.text("segments");
    pickler_.begin_list();
    for (size_t i = 0; i < states_.size(); ++i) write_segments(history_.devices[i].index, states_[i]);
    pickler_.end_list();
    pickler_.text("device_traces");
    pickler_.begin_list();
    int next = 0;
    for (size_t i = 0; i < states_.size(); ++i) {
      for (; next < history_.devices[i].index; ++next) write_nothing();
      write_entries(history_.devices[i].index, states_[i].events);
      ++next;
    }
    pickler_.end_list();
    pickler_.text("allocator_settings");
    pickler_.begin_dict();
    pickler_.item("PYTORCH_CUDA_ALLOC_CONF", trace_.process.allocator_settings);
    pickler_.end_dict();
    pickler_.text("external_annotations");
    write_annotations();
    for (const char* of_host : {"host_segments", "host_traces"}) {
      pickler_.text(of_host);
      write_nothing();
    }
    pickler_.end_dict();
    return pickler_.finish();
  }

 private:
  void write_nothing() {
    pickler_.begin_list();
    pickler_.end_list();
  }

  // The scopes that PyTorch or the program opened.
  void write_annotations() {
    uint64_t last = 0;
    for (const ShownState& state : states_) last = std::max(last, state.events);
    pickler_.begin_list();
    for (auto at = trace_.events.begin(); at != trace_.events.end() && at.index() < last; ++at) {
      if (at->kind != EventKind::scope_begin && at->kind != EventKind::scope_end) continue;
      pickler_.begin_dict();
      pickler_.item("stage", at->kind == EventKind::scope_begin ? "START" : "END");
      pickler_.item("name", trace_.name(at->detail));
      pickler_.item("device", at->device);
      pickler_.item("time_us", trace_.time_ns(*at) / 1000);
      pickler_.end_dict();
    }
    pickler_.end_list();
  }

  void write_segments(int device, const ShownState& state) {
    const BlocksByAddress blocks = by_address(state.blocks);
    for (const SegmentLayout& segment : state.segments) {
      pickler_.begin_dict();
      pickler_.item("device", device);
      pickler_.item("address", static_cast<int64_t>(segment.address));
      pickler_.item("total_size", segment.bytes);
      pickler_.item("allocated_size", segment.used_bytes);
      pickler_.item("active_size", segment.used_bytes);
      pickler_.item("requested_size", segment.used_bytes);
      pickler_.item("stream", static_cast<int64_t>(segment.stream));
      pickler_.item("segment_type", segment.small ? "small" : "large");
      pickler_.text("is_expandable");
      pickler_.boolean(segment.expandable);
      pickler_.text("segment_pool_id");
      pickler_.begin_list();
      pickler_.integer(0);
      pickler_.integer(segment.pool);
      pickler_.end_list();
      pickler_.text("frames");
      write_nothing();
      pickler_.text("blocks");
      write_blocks(segment, blocks);
      pickler_.end_dict();
    }
  }

  void write_blocks(const SegmentLayout& segment, const BlocksByAddress& blocks) {
    pickler_.begin_list();
    for_each_piece(segment, blocks, [&](int64_t offset, int64_t bytes, const LiveBlock* live) {
      const uint64_t address = segment.address + static_cast<uint64_t>(offset);
      if (live == nullptr) return write_block(address, bytes, 0, "inactive", {});
      write_block(address, bytes, live->requested_bytes,
                  live->pending_free ? "active_pending_free" : "active_allocated", live->made);
    });
    pickler_.end_list();
  }

  void write_block(uint64_t address, int64_t bytes, int64_t requested, const char* state, const Where& made) {
    pickler_.begin_dict();
    pickler_.item("address", static_cast<int64_t>(address));
    pickler_.item("size", bytes);
    pickler_.item("requested_size", requested);
    pickler_.item("state", state);
    pickler_.text("frames");
    frames_.write(made);
    pickler_.end_dict();
  }

  void write_entries(int device, uint64_t end) {
    NodeTable nodes;
    pickler_.begin_list();
    for (auto at = trace_.events.begin(); at != trace_.events.end() && at.index() < end; ++at) {
      if (at->kind == EventKind::nodes_created) nodes.add(*at);
      if (at->device == device && !action_of(at->kind).empty()) write_entry(*at, place_of(nodes, *at));
    }
    pickler_.end_list();
  }

  // What is known of a free is the node that asked for it; its context is that of the alloc.
  Where place_of(const NodeTable& nodes, const Event& event) const {
    Where where = locate(trace_, nodes, event);
    const bool frees = event.kind == EventKind::free_requested || event.kind == EventKind::free_completed;
    if (!frees || trace_.process.snapshot) return where;
    if (!in_node(event)) return {.op = "free"};
    where.node = "backward";
    return where;
  }

  std::string_view scope_of(const Event& event) const {
    return event.kind == EventKind::alloc ? trace_.name(trace_.context(event.context).scope) : std::string_view();
  }

  void write_entry(const Event& event, const Where& where) {
    write_entry(action_of(event.kind), event, where);
    const bool completed = event.kind == EventKind::free_requested && (event.flags & kFreeCompleted) != 0;
    if (completed) write_entry("free_completed", event, where);
  }
  void write_entry(std::string_view action, const Event& event, const Where& where) {
    pickler_.begin_dict();
    pickler_.item("action", action);
    pickler_.item(event.kind == EventKind::out_of_memory ? "device_free" : "addr", static_cast<int64_t>(event.address));
    pickler_.item("size", event.bytes);
    pickler_.item("stream", static_cast<int64_t>(event.detail));
    pickler_.item("time_us", trace_.time_ns(event) / 1000);
    pickler_.item("compile_context", "N/A");
    pickler_.item("user_metadata", "");
    pickler_.text("frames");
    frames_.write(where, scope_of(event));
    pickler_.end_dict();
  }

  const Trace& trace_;
  const History& history_;
  std::vector<ShownState> states_;  ///< of each device
  Pickler pickler_;
  Frames frames_;
};

}  // namespace

std::string to_snapshot(const Trace& trace, const History& history, SnapshotTime time) {
  return SnapshotWriter(trace, history, time).write();
}

}  // namespace oomdiag
