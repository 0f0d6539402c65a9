#include "extension/record/place.h"

#include <algorithm>

#include "extension/record/intern_cache.h"
#include "profiler/event.h"

namespace oomdiag {

Frame& Place::enter(const void* call) noexcept {
  Frame& frame = frames_[depth_++];
  frame.call = call;
  frame.outside = now_;
  frame.is_outermost = frame.is_builtin = frame.is_accumulate = frame.is_optimizer_step = frame.runs_node = false;
  frame.scope_name = 0;
  return frame;
}

bool Place::leave(const void* call, InternCache& names, Frame& ended) {
  uint32_t end = depth_;
  while (end > 0 && frames_[end - 1].call != call) --end;
  if (end == 0) return false;
  ended = frames_[end - 1];
  if (end == depth_) {
    leave();
  } else {
    erase_out_of_order(end - 1, ended, names);
    --depth_;
  }
  return true;
}

// An op that opened scopes ends before them where ops are dispatched in Python (record_function() under a TorchDispatchMode).
void Place::erase_out_of_order(uint32_t index, const Frame& ended, InternCache& names) {
  Frame* const inside = frames_ + index;
  Frame* const end = frames_ + depth_;
  std::move(inside + 1, end, inside);
  inside->outside = ended.outside;
  const bool opened_scopes = ended.is_outermost && ended.scope_name == 0 && !ended.runs_node &&
                             std::all_of(inside, end - 1, [](const Frame& frame) { return frame.scope_name != 0; });
  if (!opened_scopes) return;
  const auto leave_op = [&](WorkPlace& place) {
    place.context.op = ended.outside.context.op;
    place.context.inner = ended.outside.context.inner;
    place.context.flags = ended.outside.context.flags;
    place.context_id = names.context(place.context);
    place.call_id = ended.outside.call_id;
  };
  std::for_each(inside + 1, end - 1, [&](Frame& frame) { leave_op(frame.outside); });
  leave_op(now_);
}

void Place::adopt_node(uint32_t name, uint64_t sequence, uint16_t thread) noexcept {
  now_.context.node = name;
  now_.node_sequence = sequence;
  now_.node_thread = thread;
}

void Place::end_adopted_node() noexcept {
  has_adopted_ = false;
  now_.context.node = 0;
  now_.node_sequence = kNoNode;
}

size_t Place::running_nodes() const noexcept {
  const auto runs_node = [](const Frame& frame) { return frame.runs_node; };
  return static_cast<size_t>(std::count_if(frames_, frames_ + depth_, runs_node)) + (has_adopted_ ? 1 : 0);
}

}  // namespace oomdiag
