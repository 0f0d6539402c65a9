#include "profiler/snapshot/to_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <span>

#include "profiler/event.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/snapshot/earlier_state.h"
#include "profiler/snapshot/snapshot.h"
#include "profiler/snapshot/steps.h"
#include "profiler/trace/format.h"
#include "profiler/trace/packed_events.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

/// What a snapshot shows of one GPU, in the order in which it happened: its history, after each OOM the calls that led
/// to it, and at last the layout that the snapshot found.
class GpuStory {
 public:
  /// `layout` is that at the end; a GPU without a history has it at `late`.
  GpuStory(const Snapshot& snapshot, size_t gpu, int64_t start_us, std::vector<Event> layout, uint64_t late)
      : snapshot_(snapshot),
        device_(static_cast<uint8_t>(gpu)),
        start_us_(start_us),
        late_(late),
        layout_(std::move(layout)) {
    if (gpu < snapshot.traces.size()) entries_ = snapshot.traces[gpu];
  }
  GpuStory(const GpuStory&) = delete;
  GpuStory& operator=(const GpuStory&) = delete;

  void restart() {
    at_ = entries_.begin();
    last_ = entries_.empty() ? late_ : 0;
    extra_.clear();
    next_extra_ = 0;
    any_oom_ = oom_is_last_ = in_layout_ = over_ = false;
    next();
  }
  bool is_over() const { return over_; }
  const Event& now() const { return now_; }
  uint64_t time() const { return last_; }

  void next() {
    if (next_extra_ < extra_.size()) {
      now_ = extra_[next_extra_++];
      now_.time = last_;
      return;
    }
    extra_.clear();
    next_extra_ = 0;
    while (at_ != entries_.end() && at_->kind == EventKind::none) ++at_;
    if (at_ != entries_.end()) return next_entry();
    // What follows an OOM directly describes it: a snapshot taken right then has its segments. One that has none is
    // checked by them. But after an OOM was unwound they say nothing about it.
    over_ = in_layout_ || (any_oom_ && !oom_is_last_) || layout_.empty();
    if (over_) return;
    in_layout_ = true;
    extra_ = layout_;
    next();
  }

 private:
  void next_entry() {
    now_ = *at_;
    ++at_;
    now_.time = nanoseconds_since(start_us_, static_cast<int64_t>(now_.time));
    const bool completes = now_.kind == EventKind::free_requested && snapshot_.frees_are_requests;
    if (completes) now_.kind = EventKind::free_completed;
    now_.thread = device_;
    now_.device = device_;
    last_ = std::max(last_, now_.time);
    oom_is_last_ = now_.kind == EventKind::out_of_memory;
    any_oom_ |= oom_is_last_;
    if (oom_is_last_) add_stacks(snapshot_.places[now_.context]);
  }

  void add_stacks(const SnapshotPlace& place) {
    Event stack{.thread = device_, .kind = EventKind::stack, .device = device_};
    stack.detail = place.stack;
    if (place.stack != 0) extra_.push_back(stack);
    stack.detail = place.native_stack;
    stack.flags = kNativeStack;
    if (place.native_stack != 0) extra_.push_back(stack);
  }

  const Snapshot& snapshot_;
  uint8_t device_;
  int64_t start_us_;
  uint64_t late_;
  EventLog entries_;
  EventLog::Iterator at_;
  std::vector<Event> layout_;
  std::vector<Event> extra_;  ///< what comes before the next entry
  size_t next_extra_ = 0;
  Event now_;
  uint64_t last_ = 0;  ///< the latest time so far
  bool any_oom_ = false, oom_is_last_ = false, in_layout_ = false, over_ = false;
};

/// What is found out about a GPU on the way.
struct GpuState {
  GpuState(const AllocatorSettings& settings, std::span<const SnapshotSegment> segments, int gpu)
      : earlier(settings, segments, gpu) {}

  EarlierState earlier;
  int64_t reserved = 0;             ///< more than at the beginning
  std::optional<int64_t> usable{};  ///< that the GPU has at least, besides what was reserved at the beginning

  void see(const Event& event) {
    if (event.kind == EventKind::segment_state || event.kind == EventKind::block_state) return;
    earlier.see(event);
    const int64_t bytes = std::clamp<int64_t>(event.bytes, 0, kMaxSaneBytes);
    if (event.kind == EventKind::segment_alloc || event.kind == EventKind::segment_map) reserved += bytes;
    if (event.kind == EventKind::segment_free || event.kind == EventKind::segment_unmap) reserved -= bytes;
    reserved = std::clamp(reserved, -kMaxSaneBytes, kMaxSaneBytes);
    // How large a GPU is no snapshot says; it has at least what was reserved, and at an OOM what was free besides.
    const uint64_t free_bytes = event.kind == EventKind::out_of_memory ? event.address : 0;
    const auto free = static_cast<int64_t>(std::min<uint64_t>(free_bytes, kMaxSaneBytes));
    usable = std::max(usable.value_or(INT64_MIN), reserved + free);
  }
};

class Converter {
 public:
  explicit Converter(Snapshot snapshot)
      : snapshot_(std::move(snapshot)), settings_(parse_allocator_settings(snapshot_.allocator_settings)) {}

  Trace convert() {
    const size_t gpus = count_gpus();
    trace_.devices.resize(gpus);
    trace_.process.snapshot = true;
    trace_.process.end_state = EndState::exited;
    trace_.process.allocator_settings = snapshot_.allocator_settings;
    trace_.names = snapshot_.names;
    for (const SnapshotPlace& place : snapshot_.places) {
      trace_.contexts.push_back({.op = place.op,
                                 .inner = place.op,
                                 .node = place.node,
                                 .module = place.module,
                                 .source = place.source,
                                 .scope = place.scope,
                                 .inner_source = place.inner_source});
      trace_.stack_marks.push_back(place.marks);
    }
    trace_.names.emplace_back("older than the recording");
    trace_.contexts.push_back({.source = static_cast<uint32_t>(trace_.names.size() - 1)});
    older_ = static_cast<uint32_t>(trace_.contexts.size() - 1);
    for (const EventLog& entries : snapshot_.traces) {
      if (!entries.empty()) start_us_ = std::min(start_us_, static_cast<int64_t>(entries.front().time));
    }
    for (size_t gpu = 0; gpu < gpus; ++gpu) add_gpu(gpu);
    pack(look_through());
    return std::move(trace_);
  }

 private:
  size_t count_gpus() const {
    size_t gpus = snapshot_.traces.size();
    while (gpus > 0 && snapshot_.traces[gpus - 1].empty()) --gpus;
    for (const SnapshotSegment& segment : snapshot_.segments) {
      gpus = std::max(gpus, static_cast<size_t>(segment.device) + 1);
    }
    return std::min<size_t>(gpus, kMaxDevices);
  }

  void add_gpu(size_t gpu) {
    GpuState& state = states_.emplace_back(settings_, snapshot_.segments, static_cast<int>(gpu));
    std::vector<Event> at_the_end = state.earlier.layout();
    if (gpu < snapshot_.traces.size() && !snapshot_.traces[gpu].empty()) {
      const auto end_us = static_cast<int64_t>(snapshot_.traces[gpu].back().time);
      any_history_ = true;
      end_ = std::max(end_, nanoseconds_since(start_us_, end_us));
    }
    if (!any_history_) at_the_end.clear();  // the trace begins with it
    stories_.emplace_back(snapshot_, gpu, start_us_, std::move(at_the_end), end_);
  }

  void begin_gpu(GpuState& state, Device& gpu) {
    state.earlier.rewind();
    const auto layout = state.earlier.layout();
    auto blocks = state.earlier.blocks();
    for (Event& block : blocks) {
      // PyTorch records no stacks before the history is on: without a frame a block is not one of backward then.
      if (block.context == 0 || snapshot_.places[block.context].frameless) block.context = older_;
    }
    trace_.initial_layout.insert(trace_.initial_layout.end(), layout.begin(), layout.end());
    trace_.initial.insert(trace_.initial.end(), blocks.begin(), blocks.end());
    int64_t reserved = 0;
    for (const Event& event : layout) reserved += event.kind == EventKind::segment_state ? event.bytes : 0;
    if (state.usable) gpu.total_bytes = std::clamp<int64_t>(reserved + *state.usable, 0, 2 * kMaxSaneBytes);
  }

  // All GPUs' events by time, and those of the same time by GPU.
  template <class Take>
  void visit_events(const Take& take) {
    for (GpuStory& story : stories_) story.restart();
    while (true) {
      GpuStory* next = nullptr;
      for (GpuStory& story : stories_) {
        if (!story.is_over() && (next == nullptr || story.time() < next->time())) next = &story;
      }
      if (next == nullptr) return;
      take(next->now());
      next->next();
    }
  }

  // The first of two passes: what lay there before, how large the GPUs are at least, where the steps are.
  SnapshotSteps look_through() {
    StepFinder finder(snapshot_);
    visit_events([&](const Event& event) {
      finder.take(event, start_us_);
      states_[event.device].see(event);
    });
    for (size_t gpu = 0; gpu < states_.size(); ++gpu) begin_gpu(states_[gpu], trace_.devices[gpu]);
    return finder.find();
  }

  // With the steps as the recorder would have written them.
  void pack(const SnapshotSteps& steps) {
    if (!steps.begins.empty() || !steps.ends.empty()) trace_.names.emplace_back("Optimizer.step");
    const uint64_t scope = trace_.names.size() - 1;
    EventPacker packer;
    add_host_blocks(packer);
    auto begin = steps.begins.begin(), end = steps.ends.begin();
    size_t index = 0;
    uint64_t time = 0;
    const auto add_steps = [&] {
      for (; end != steps.ends.end() && *end == index; ++end) {
        packer.add({.time = time, .detail = scope, .kind = EventKind::scope_begin});
        packer.add({.time = time, .detail = scope, .kind = EventKind::scope_end});
      }
      for (; begin != steps.begins.end() && *begin == index; ++begin) {
        packer.add({.time = time, .kind = EventKind::nodes_created});
      }
    };
    visit_events([&](const Event& event) {
      add_steps();
      packer.add(event);
      time = event.time;
      ++index;
    });
    add_steps();
    if (const size_t odd = count_contradictions(); odd > 0) {
      packer.add(note(fmt::format("{} of its segments overlap or hold blocks that do not fit into them", odd), time));
    }
    trace_.events = log_of(packer.finish());
  }

  // Pinned host blocks do not say when they came to be: they are written before all else.
  void add_host_blocks(EventPacker& packer) {
    if (snapshot_.host_blocks.empty()) return;
    trace_.names.emplace_back("libc10_cuda.so");
    for (const SnapshotBlock& block : snapshot_.host_blocks) {
      packer.add({.address = block.address,
                  .bytes = std::clamp<int64_t>(block.bytes, 0, kMaxSaneBytes),
                  .detail = trace_.names.size() - 1,
                  .context = block.place,
                  .kind = EventKind::driver_alloc,
                  .flags = static_cast<uint16_t>(DriverMemory::pinned)});
    }
  }

  // Segments are sorted by GPU and address.
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
  Event note(const std::string& text, uint64_t time) {
    trace_.names.emplace_back("snapshot");
    trace_.contexts.push_back({.op = static_cast<uint32_t>(trace_.names.size() - 1)});
    trace_.names.push_back(text);
    return {.time = time,
            .detail = trace_.names.size() - 1,
            .context = static_cast<uint32_t>(trace_.contexts.size() - 1),
            .kind = EventKind::note};
  }

  Snapshot snapshot_;
  AllocatorSettings settings_;
  Trace trace_;
  int64_t start_us_ = INT64_MAX;
  uint32_t older_ = 0;  ///< the context of blocks that are older than the history, where nothing else is known
  std::deque<GpuStory> stories_;  ///< their iterators point into them
  std::deque<GpuState> states_;   ///< by GPU
  bool any_history_ = false;      ///< on the GPUs so far
  uint64_t end_ = 0;              ///< … of the newest of them
};

}  // namespace

Trace to_trace(Snapshot snapshot) { return Converter(std::move(snapshot)).convert(); }

}  // namespace oomdiag
