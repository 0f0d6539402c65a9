#include "extension/virtual_device/driver/stream.h"

#include <memory>

#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/locks.h"

namespace oomdiag {
namespace {

uint64_t next_stream_id = 100;  // under stream_lock()

/// The objects behind handles. None is ever freed, so that the handle of one that is destroyed is an error and no crash; its
/// place serves the next one. Under stream_lock().
template <typename Object>
class Handles {
 public:
  Object& add() {
    if (free_.empty()) {
      all_.push_back(std::make_unique<Object>());
      return *all_.back();
    }
    Object& object = *free_.back();
    free_.pop_back();
    return object;
  }

  void drop(Object& object) {
    object.context = nullptr;
    object.dependencies.clear();
    free_.push_back(&object);
  }

  template <typename Use>
  void for_each_of(const Context& context, Use use) {
    for (const auto& object : all_) {
      if (object->context == &context) use(*object);
    }
  }

 private:
  std::vector<std::unique_ptr<Object>> all_;
  std::vector<Object*> free_;
};

// Never destroyed: programs destroy streams and events in their own destructors.
auto& streams = *new Handles<Stream>;
auto& events = *new Handles<Event>;

bool is_default(CUstream handle) {
  return reinterpret_cast<uintptr_t>(handle) <= reinterpret_cast<uintptr_t>(CU_STREAM_PER_THREAD);
}

}  // namespace

StreamsLock& stream_lock() noexcept {
  static auto& lock = *new StreamsLock;
  return lock;
}

Stream* find_stream(CUstream handle) noexcept {
  if (!is_default(handle)) {
    auto* stream = reinterpret_cast<Stream*>(handle);
    return stream->context ? stream : nullptr;
  }
  Context* context = current_context();
  return context ? context->legacy_stream : nullptr;
}

CUresult stream_error(CUstream handle) noexcept {
  return is_default(handle) ? check_context() : CUDA_ERROR_INVALID_HANDLE;
}

Event* find_event(CUevent handle) noexcept {
  auto* event = reinterpret_cast<Event*>(handle);
  return event && event->context ? event : nullptr;
}

Stream& add_stream(Context& context, unsigned flags, int priority) {
  std::lock_guard guard(stream_lock());
  Stream& stream = streams.add();
  stream.context = &context;
  stream.flags = flags;
  stream.priority = priority;
  stream.id = next_stream_id++;
  stream.end_ns = 0;
  return stream;
}

Event& add_event(Context& context, unsigned flags) {
  std::lock_guard guard(stream_lock());
  Event& event = events.add();
  event = {.context = &context, .flags = flags};
  return event;
}

void drop_stream(Stream& stream) {
  std::lock_guard guard(stream_lock());
  streams.drop(stream);
}

void drop_event(Event& event) {
  std::lock_guard guard(stream_lock());
  events.drop(event);
}

void drop_streams_of(Context& context) {
  std::vector<std::unique_ptr<Graph>> dropped;  // after the lock
  std::lock_guard guard(stream_lock());
  streams.for_each_of(context, [&](Stream& stream) {
    dropped.push_back(abandon_capture(stream));
    streams.drop(stream);
  });
  events.for_each_of(context, [](Event& event) { events.drop(event); });
  for (auto* end :
       {&context.legacy_stream->end_ns, &context.end_ns, &context.legacy_end_ns, &context.blocking_end_ns}) {
    *end = 0;
  }
}

}  // namespace oomdiag
