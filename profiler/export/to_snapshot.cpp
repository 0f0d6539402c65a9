#include "profiler/export/to_snapshot.h"

#include <array>
#include <charconv>
#include <map>
#include <string_view>

#include "profiler/export/pickler.h"
#include "profiler/export/pieces.h"
#include "profiler/replay/evidence/join.h"

namespace oomdiag {
namespace {

constexpr uint64_t kMaxEntries = 1 << 20;  // a card

/// Frames of one kind of place are written once.
class Frames {
 public:
  explicit Frames(Pickler& pickler) : pickler_(pickler) {}

  void write(const Where& where) {
    const auto [known, fresh] =
        numbers_.try_emplace(Key{where.node, where.op, where.module, where.source, where.inner_source});
    if (!fresh) return pickler_.recall(known->second);
    pickler_.begin_list();
    if (!where.node.empty()) frame(where.node, "autograd", 0);
    if (!where.op.empty()) frame(where.op, "op", 0);
    if (!where.module.empty()) frame(where.module, "module", 0);
    line(where.inner_source);
    line(where.source);
    pickler_.end_list();
    known->second = pickler_.remember();
  }

 private:
  using Key = std::array<std::string_view, 5>;

  void frame(std::string_view name, std::string_view file, int64_t number) {
    pickler_.begin_dict();
    pickler_.item("name", name);
    pickler_.item("filename", file);
    pickler_.item("line", number);
    pickler_.end_dict();
  }
  void line(std::string_view source) {
    if (source.empty()) return;
    const size_t colon = source.rfind(':');
    int64_t number = 0;
    if (colon != source.npos) std::from_chars(source.data() + colon + 1, source.data() + source.size(), number);
    frame("line", source.substr(0, colon), number);
  }

  Pickler& pickler_;
  std::map<Key, uint32_t> numbers_;
};

const char* action_of(EventKind kind) {
  switch (kind) {
    case EventKind::alloc:
      return "alloc";
    case EventKind::free_requested:
      return "free_requested";
    case EventKind::free_completed:
      return "free_completed";
    case EventKind::segment_alloc:
      return "segment_alloc";
    case EventKind::segment_free:
      return "segment_free";
    case EventKind::segment_map:
      return "segment_map";
    case EventKind::segment_unmap:
      return "segment_unmap";
    case EventKind::out_of_memory:
      return "oom";
    default:
      return nullptr;
  }
}

class SnapshotWriter {
 public:
  SnapshotWriter(const Trace& trace, const History& history) : trace_(trace), history_(history), frames_(pickler_) {}

  std::string write() {
    pickler_.begin_dict();
    pickler_.text("segments");
    pickler_.begin_list();
    for (const DeviceHistory& device : history_.devices) write_segments(device);
    pickler_.end_list();
    pickler_.text("device_traces");
    pickler_.begin_list();
    int next = 0;
    for (const DeviceHistory& device : history_.devices) {
      for (; next < device.index; ++next) write_nothing();
      write_entries(device);
      ++next;
    }
    pickler_.end_list();
    pickler_.text("allocator_settings");
    pickler_.begin_dict();
    pickler_.item("PYTORCH_CUDA_ALLOC_CONF", trace_.process.allocator_settings);
    pickler_.end_dict();
    pickler_.text("external_annotations");
    write_nothing();
    pickler_.end_dict();
    return pickler_.finish();
  }

 private:
  void write_nothing() {
    pickler_.begin_list();
    pickler_.end_list();
  }

  void write_segments(const DeviceHistory& device) {
    const BlocksByAddress blocks = by_address(device.state);
    for (const SegmentLayout& segment : device.state.segments) {
      pickler_.begin_dict();
      pickler_.item("device", device.index);
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

  void write_entries(const DeviceHistory& device) {
    NodeTable nodes;
    uint64_t last = device.state.event, entries = 0;
    for (auto at = trace_.events.begin(); at != trace_.events.end() && at.index() <= last; ++at) {
      entries += at->device == device.index && action_of(at->kind) != nullptr ? 1 : 0;
    }
    uint64_t skip = entries > kMaxEntries ? entries - kMaxEntries : 0;
    pickler_.begin_list();
    if (!device.peak.at_start || device.failure) {
      for (auto at = trace_.events.begin(); at != trace_.events.end() && at.index() <= last; ++at) {
        if (at->kind == EventKind::nodes_created) nodes.add(*at);
        if (at->device != device.index || action_of(at->kind) == nullptr || (skip > 0 && skip-- > 0)) continue;
        write_entry(*at, locate(trace_, nodes, *at));
      }
    }
    pickler_.end_list();
  }

  void write_entry(const Event& event, const Where& where) {
    write_entry(action_of(event.kind), event, where);
    const bool completed = event.kind == EventKind::free_requested && (event.flags & kFreeCompleted) != 0;
    if (completed) write_entry("free_completed", event, where);
  }
  void write_entry(const char* action, const Event& event, const Where& where) {
    pickler_.begin_dict();
    pickler_.item("action", action);
    pickler_.item(event.kind == EventKind::out_of_memory ? "device_free" : "addr", static_cast<int64_t>(event.address));
    pickler_.item("size", event.bytes);
    pickler_.item("stream", static_cast<int64_t>(event.detail));
    pickler_.item("time_us", trace_.time_ns(event) / 1000);
    pickler_.item("compile_context", "N/A");
    pickler_.item("user_metadata", "");
    pickler_.text("frames");
    frames_.write(where);
    pickler_.end_dict();
  }

  const Trace& trace_;
  const History& history_;
  Pickler pickler_;
  Frames frames_;
};

}  // namespace

std::string to_snapshot(const Trace& trace, const History& history) { return SnapshotWriter(trace, history).write(); }

}  // namespace oomdiag
