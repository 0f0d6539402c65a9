#include "profiler/replay/steps/iterations.h"

#include "profiler/event.h"

namespace oomdiag {
namespace {

constexpr uint32_t kMaxScopes = 1 << 16;  // more come from a damaged trace
constexpr uint64_t kLeastReturns = 4;     // fewer are a warm-up

}  // namespace

void IterationFinder::read(const Event& event, uint64_t index) {
  switch (event.kind) {
    case EventKind::alloc:
      return read_alloc(event, index);
    case EventKind::scope_begin: {
      if (depths_[event.thread]++ > 0 || scopes_.size() > kMaxScopes) return;
      const bool users = trace_.name(event.detail).find('#') == std::string_view::npos;
      current_[event.thread] = users ? static_cast<uint32_t>(event.detail) : 0;
      if (!users) return;
      Scope& scope = scopes_[static_cast<uint32_t>(event.detail)];
      if (scope.calls++ == 0) scope.first = index;
      return;
    }
    case EventKind::scope_end: {
      uint32_t& depth = depths_[event.thread];
      if (depth > 0 && --depth == 0) current_[event.thread] = 0;
      return;
    }
    default:
      return;
  }
}

void IterationFinder::read_alloc(const Event& event, uint64_t index) {
  if (event.call_id == 0 || event.call_id == call_id_) return;
  call_id_ = event.call_id;
  const Context& context = trace_.context(event.context);
  if (context.module == 0) {
    outside_ = true;
    return;
  }
  ++ops_;
  if (!current_.empty()) {
    const uint32_t scope = current_[event.thread];
    if (scope != 0) ++scopes_[scope].ops;
  }
  if (call_.context == 0) {
    call_.context = event.context;
    call_.first = index;
    graph_ = (context.flags & kGradMode) != 0;
  }
  if (call_.context == event.context) {
    ++returns_;
    ops_before_return_ = ops_ - 1;
    if (outside_) ++returns_after_outside_;
  }
  outside_ = false;
}

IterationRule IterationFinder::finish(bool trains) const {
  if (trains || call_.context == 0) return {.first = call_.first};
  for (const auto& [name, scope] : scopes_) {
    if (scope.calls > 1 && scope.ops * 10 > ops_ * 9) return {.first = scope.first, .scope = name};
  }
  if (!trace_.process.python) return {.first = call_.first};  // what looks like modules are scopes
  IterationRule rule = call_;
  // Where gradients are on it may be the first forward pass of a training run: its layers are no iterations.
  rule.after_outside = graph_ || returns_after_outside_ >= kLeastReturns;
  const uint64_t calls = rule.after_outside ? returns_after_outside_ : returns_;
  // A loop inside of a layer, as over the images of a batch: the layers that follow are those of all its turns.
  const bool is_inside = calls > 2 && ops_before_return_ * 2 < ops_;
  return calls > 1 && !is_inside ? rule : IterationRule{.first = call_.first};
}

}  // namespace oomdiag
