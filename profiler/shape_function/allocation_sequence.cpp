#include "profiler/shape_function/allocation_sequence.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>

#include "profiler/event.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/steps/ooms.h"
#include "profiler/trace/format.h"
#include "profiler/trace/mix.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

using ItemKind = AllocationSequence::ItemKind;

constexpr uint64_t kFreedByItsOp = uint64_t{1} << 40;

uint64_t hash_of(std::string_view text) {
  uint64_t hash = text.size();
  for (const char c : text) hash = mix(hash, static_cast<unsigned char>(c));
  return hash;
}

uint64_t place_of(const Trace& trace, const Context& context) {
  uint64_t hash = 0;
  for (const uint32_t name :
       {context.op, context.inner, context.node, context.module, context.source, context.inner_source}) {
    hash = mix(hash, hash_of(trace.name(name)));
  }
  return hash;
}

std::string words_of(const Trace& trace, const Context& context) {
  std::string text;
  for (const uint32_t name : {context.node, context.op, context.module, context.source}) {
    if (!trace.name(name).empty()) text += fmt::format("{}{}", text.empty() ? "" : " ← ", trace.name(name));
  }
  return text;
}

uint8_t busiest_device(const Trace& trace) {
  std::array<int64_t, 256> requested{};
  for (const Event& event : trace.events) {
    if (event.kind == EventKind::alloc) requested[event.device] += event.bytes;
  }
  return static_cast<uint8_t>(std::max_element(requested.begin(), requested.end()) - requested.begin());
}

class SequenceReader {
 public:
  SequenceReader(const Trace& trace, uint8_t device) : trace_(trace), device_(device) {
    sequence_.settings = parse_allocator_settings(trace.process.allocator_settings);
    sequence_.ended = trace.process.end_state == EndState::exited || trace.process.python_ended;
    if (device < trace.devices.size()) sequence_.total_bytes = trace.devices[device].total_bytes;
    sequence_.places.resize(trace.contexts.size());
    places_.resize(trace.contexts.size());
  }

  AllocationSequence read() {
    sequence_.unusable = why_unusable();
    if (!sequence_.unusable.empty()) return std::move(sequence_);
    for (const Event& event : trace_.events) {
      end_steps_before(event.sequence);
      if (event.device == device_) take(event);
    }
    end_steps_before(~uint64_t{0});
    return std::move(sequence_);
  }

 private:
  std::string why_unusable() const {
    if (trace_.overwritten_events > 0 || trace_.dropped_events > 0 || !trace_.process.recorder_failure.empty())
      return "its recording has gaps";
    if (trace_.process.snapshot || trace_.process.unwatched) return "its allocator reports nothing of single requests";
    if (!trace_.initial.empty() || !trace_.initial_layout.empty()) return "memory was allocated before recording began";
    if (trace_.step_stride > 1) return "it ran too many steps";
    return {};
  }

  void end_steps_before(uint64_t sequence) {
    while (step_ < trace_.step_ends.size() && trace_.step_ends[step_] < sequence) {
      sequence_.step_ends.push_back(sequence_.items.size());
      ++step_;
    }
  }

  void take(const Event& event) {
    const bool gives_back = event.kind == EventKind::segment_free || event.kind == EventKind::segment_unmap;
    if (gives_back && !in_release_) add(ItemKind::release_cached, 0);
    in_release_ = gives_back;
    if (event.kind == EventKind::alloc) return allocate(event);
    if (event.kind == EventKind::free_requested) {
      return free(event, (event.flags & kFreeCompleted) != 0 ? ItemKind::free : ItemKind::free_requested);
    }
    if (event.kind == EventKind::free_completed) return free(event, ItemKind::free_completed);
    if (event.kind == EventKind::out_of_memory) sequence_.unusable = "it ran out of memory";
    if (event.kind == EventKind::memory_stats) reserved_ = static_cast<int64_t>(event.address);
    if (event.kind == EventKind::device_memory) {
      const int64_t outside = event.bytes - static_cast<int64_t>(event.address) - reserved_;
      sequence_.non_pytorch_bytes = std::max(sequence_.non_pytorch_bytes, outside);
    }
  }

  void allocate(const Event& event) {
    const auto group = groups_.try_emplace({event.detail, pool_of(event.flags)}, static_cast<uint32_t>(groups_.size()));
    live_[event.address] = {static_cast<uint32_t>(sequence_.allocations.size()), event.call_id};
    add(ItemKind::alloc, static_cast<uint32_t>(sequence_.allocations.size()));
    sequence_.allocations.push_back({.requested_bytes = event.bytes,
                                     .place = known_place(event.context),
                                     .group = group.first->second,
                                     .context = event.context < places_.size() ? event.context : 0,
                                     .call = event.call_id});
  }

  void free(const Event& event, ItemKind kind) {
    const auto found = live_.find(event.address);
    if (found == live_.end()) return;
    const auto [allocation, op] = found->second;
    add(kind, allocation);
    // A temporary of an op, as a workspace is: distinguished from what the op returns.
    if (kind != ItemKind::free_completed && op != 0 && op == event.call_id) {
      sequence_.allocations[allocation].place ^= kFreedByItsOp;
      sequence_.allocations[allocation].is_temporary = true;
      sequence_.allocations[allocation].is_optional = retries_with_less(trace_, trace_.context(event.context));
    }
    if (kind != ItemKind::free_requested) live_.erase(found);
  }

  uint64_t known_place(uint32_t context) {
    if (context >= places_.size()) return 0;
    if (places_[context] == 0) {
      places_[context] = place_of(trace_, trace_.context(context)) | 1;
      sequence_.places[context] = words_of(trace_, trace_.context(context));
    }
    return places_[context];
  }

  void add(ItemKind kind, uint32_t allocation) { sequence_.items.push_back({.kind = kind, .allocation = allocation}); }

  const Trace& trace_;
  uint8_t device_;
  AllocationSequence sequence_;
  std::vector<uint64_t> places_;  ///< by context, 0 = not yet known
  std::map<std::pair<uint64_t, uint8_t>, uint32_t> groups_;
  std::unordered_map<uint64_t, std::pair<uint32_t, uint32_t>>
      live_;  ///< by address: allocation, and the call of an op that made it
  size_t step_ = 0;
  bool in_release_ = false;
  int64_t reserved_ = 0;
};

}  // namespace

void AllocationSequence::cut(size_t steps) {
  if (steps >= step_ends.size()) return;
  items.resize(steps == 0 ? 0 : step_ends[steps - 1]);
  step_ends.resize(steps);
  uint32_t count = 0;
  for (const Item& item : items) count += item.kind == ItemKind::alloc ? 1 : 0;
  allocations.resize(count);
  ended = false;
}

AllocationSequence read_allocation_sequence(const Trace& trace) {
  return SequenceReader(trace, busiest_device(trace)).read();
}

}  // namespace oomdiag
