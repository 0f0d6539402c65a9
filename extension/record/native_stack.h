#pragma once

#include "profiler/event.h"

namespace oomdiag {

class InternCache;

/// Where a thread was, as addresses. Taking it costs microseconds, and neither locks nor allocates (glibc 2.35, gcc 12; with
/// older ones the loader's lock is taken for a moment).
struct NativeStack {
  static constexpr int kMaxFrames = 96;
  void* frames[kMaxFrames];
  int depth = 0;

  void capture() noexcept;
};

/// Finds the operators that run on `stack`, and names the outermost and the innermost in `context`. Costs tens of
/// microseconds. False where there are none.
bool find_ops(const NativeStack& stack, InternCache& names, Context& context);

}  // namespace oomdiag
