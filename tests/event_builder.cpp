#include "tests/event_builder.h"

#include <algorithm>
#include <stdexcept>

namespace oomdiag {

EventBuilder::EventBuilder(SimulatedAllocator::Settings gpu) : gpu_(gpu) {
  trace_.process.pid = 4711;
  trace_.process.virtual_device = true;
  trace_.process.torch_version = "2.15.0+cu132";
  trace_.process.command = "train";
  trace_.process.end_state = EndState::exited;
  trace_.names.emplace_back();
  trace_.contexts.emplace_back();
  now_.thread = 1;
  device(0);
}

EventBuilder& EventBuilder::op(const Place& place) {
  const uint32_t node = context_.node;
  const bool recomputed = node != 0 && place.grad && now_.node_sequence != kNoNode;
  now_.call_id = ++call_ids_;
  enter({.op = intern(place.op),
         .inner = intern(place.inner.empty() ? place.op : place.inner),
         .node = node,
         .module = intern(place.module),
         .source = intern(place.source),
         .scope = place.scope.empty() ? scope_ : intern(place.scope),
         .flags = (place.grad && node == 0 ? uint32_t{kGradMode} : 0) | (recomputed ? uint32_t{kRecomputation} : 0)});
  return *this;
}

EventBuilder& EventBuilder::no_op() {
  now_.call_id = 0;
  enter({.node = context_.node, .scope = scope_});
  return *this;
}

EventBuilder& EventBuilder::node(std::string_view name, uint64_t sequence) {
  now_.call_id = ++call_ids_;
  now_.node_sequence = sequence;
  now_.node_thread = 1;
  enter({.node = intern(name)});
  return *this;
}

EventBuilder& EventBuilder::end_node() {
  now_.node_sequence = kNoNode;
  now_.node_thread = 0;
  now_.call_id = 0;
  enter({.scope = scope_});
  return *this;
}

EventBuilder& EventBuilder::nodes(uint64_t first, int64_t count) {
  Event& event = add({.kind = EventKind::nodes_created});
  event.bytes = count;
  event.node_sequence = first;
  event.node_thread = 1;
  return *this;
}

EventBuilder& EventBuilder::made_by_node(uint64_t sequence) {
  trace_.events.in_memory().back().address = sequence + 1;
  trace_.events.in_memory().back().detail = 1;
  return *this;
}

EventBuilder& EventBuilder::begin_scope(std::string_view name) {
  scope_ = intern(name);
  enter({.scope = scope_});
  add({.detail = scope_, .kind = EventKind::scope_begin});
  return *this;
}

EventBuilder& EventBuilder::end_scope(std::string_view name) {
  scope_ = 0;
  now_.call_id = 0;
  enter({});
  add({.detail = intern(name), .kind = EventKind::scope_end});
  return *this;
}

EventBuilder& EventBuilder::thread(uint16_t thread) {
  now_.thread = thread;
  return *this;
}

EventBuilder& EventBuilder::device(uint8_t device) {
  now_.device = device;
  if (allocators_.contains(device)) return *this;
  const auto emit = [this, device](Event event) {
    event.device = device;
    add(event);
  };
  allocators_[device] = std::make_unique<SimulatedAllocator>(gpu_, emit);
  trace_.devices.resize(std::max<size_t>(trace_.devices.size(), device + size_t{1}));
  trace_.devices[device] = {.name = "Test GPU", .total_bytes = gpu_.gpu_bytes, .compute_major = 9};
  return *this;
}

EventBuilder& EventBuilder::segment(int64_t bytes) {
  allocator().add_segment(bytes);
  return *this;
}

EventBuilder& EventBuilder::alloc(const std::string& block, int64_t bytes, uint64_t stream) {
  const auto address = allocator().allocate(bytes, stream);
  if (address) blocks_[block] = *address;
  if (!address) throw std::runtime_error("the test's GPU is full at " + block);
  return *this;
}

EventBuilder& EventBuilder::free(const std::string& block) { return request_free(block).complete_free(block); }

EventBuilder& EventBuilder::request_free(const std::string& block) {
  allocator().request_free(address_of(block));
  return *this;
}

EventBuilder& EventBuilder::complete_free(const std::string& block) {
  allocator().complete_free(address_of(block));
  return *this;
}

EventBuilder& EventBuilder::empty_cache() {
  allocator().empty_cache();
  return *this;
}

EventBuilder& EventBuilder::stats() {
  Event& event = add({.kind = EventKind::memory_stats});
  event.address = static_cast<uint64_t>(allocator().reserved_bytes());
  event.bytes = allocator().allocated_bytes();
  event.node_sequence = 0;
  Event& memory = add({.kind = EventKind::device_memory});
  memory.address = static_cast<uint64_t>(allocator().free_on_gpu());
  memory.bytes = gpu_.gpu_bytes;
  return *this;
}

EventBuilder& EventBuilder::oom(int64_t bytes, bool with_layout) {
  allocator().empty_cache();
  Event& event = add({.kind = EventKind::out_of_memory});
  event.address = static_cast<uint64_t>(allocator().free_on_gpu());
  event.bytes = allocator().round(bytes);
  stats();
  if (with_layout) allocator().describe();
  return *this;
}

EventBuilder& EventBuilder::op_failed() {
  add({.kind = EventKind::op_failed});
  return *this;
}

EventBuilder& EventBuilder::walk(uint16_t flags) {
  add({.kind = EventKind::graph_begin}).flags = flags;
  return *this;
}

EventBuilder& EventBuilder::saved(const std::string& block, std::string_view node, uint64_t sequence,
                                  std::string_view shape) {
  Event& event = add({.address = address_of(block), .kind = EventKind::saved_tensor});
  event.context = intern(Context{.node = intern(node)});
  event.call_id = 0;
  event.detail = intern(shape);
  event.node_sequence = sequence;
  event.node_thread = 1;
  return *this;
}

EventBuilder& EventBuilder::names(EventKind kind, const std::string& block, std::string_view name,
                                  std::string_view shape) {
  Event& event = add({.address = address_of(block), .kind = kind});
  event.context = intern(Context{.module = intern(name)});
  event.detail = intern(shape);
  return *this;
}

EventBuilder& EventBuilder::requested_gradient(int64_t bytes, std::string_view shape, uint64_t sequence) {
  Event& event = add({.bytes = bytes, .kind = EventKind::requested_gradient});
  event.detail = intern(shape);
  event.node_sequence = sequence;
  event.node_thread = 1;
  return *this;
}

EventBuilder& EventBuilder::note(std::string_view kind, std::string_view name) {
  Event& event = add({.kind = EventKind::note});
  event.context = intern(Context{.op = intern(kind)});
  event.detail = intern(name);
  return *this;
}

EventBuilder& EventBuilder::stack(std::string_view calls, std::string_view source) {
  Event& event = add({.kind = EventKind::stack});
  event.address = intern(source);
  event.detail = intern(calls);
  return *this;
}

EventBuilder& EventBuilder::read_from_gpu() {
  add({.kind = EventKind::note}).flags = kNoteRead;
  return *this;
}

SimulatedAllocator& EventBuilder::allocator() { return *allocators_.at(now_.device); }

Event& EventBuilder::add(Event event) {
  event.sequence = trace_.events.size() + 1;
  event.time = event.sequence * 1000;
  event.context = now_.context;
  event.call_id = now_.call_id;
  event.node_sequence = now_.node_sequence;
  event.node_thread = now_.node_thread;
  event.thread = now_.thread;
  event.device = now_.device;
  trace_.events.push_back(event);
  return trace_.events.in_memory().back();
}

uint32_t EventBuilder::intern(std::string_view name) {
  const auto found = std::find(trace_.names.begin(), trace_.names.end(), name);
  if (found != trace_.names.end()) return static_cast<uint32_t>(found - trace_.names.begin());
  trace_.names.emplace_back(name);
  return static_cast<uint32_t>(trace_.names.size() - 1);
}

uint32_t EventBuilder::intern(const Context& context) {
  const auto found = std::find(trace_.contexts.begin(), trace_.contexts.end(), context);
  if (found != trace_.contexts.end()) return static_cast<uint32_t>(found - trace_.contexts.begin());
  trace_.contexts.push_back(context);
  return static_cast<uint32_t>(trace_.contexts.size() - 1);
}

void EventBuilder::enter(const Context& context) {
  context_ = context;
  now_.context = intern(context);
}

}  // namespace oomdiag
