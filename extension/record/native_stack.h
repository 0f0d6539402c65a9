#pragma once

#include <string>
#include <string_view>

#include "profiler/event.h"

namespace oomdiag {

class InternCache;

/// Where a thread was, as addresses. Taking it costs microseconds, and but for the first time in a process it neither locks
/// nor allocates (glibc 2.35, gcc 12; with older ones the loader's lock is taken for a moment): the first time loads libgcc_s.
struct NativeStack {
  static constexpr int kMaxFrames = 96;
  void* frames[kMaxFrames];
  int depth = 0;

  void capture() noexcept;
};

/// Whether a function with this mangled name is an operator of ATen, or one of the autograd engine.
bool is_operator_symbol(std::string_view symbol);
bool is_engine_symbol(std::string_view symbol);

/// What is known of the operators on a stack.
struct FoundOps {
  bool takes_tensors = false;  ///< the outermost: one that makes tensors of nothing is not differentiated
};

/// Finds the operators that run on `stack`, and names the outermost and the innermost in `context`. Costs tens of
/// microseconds.
FoundOps find_ops(const NativeStack& stack, InternCache& names, Context& context);

/// The calls of `stack`, one per line of text, innermost first, from the one that asked the allocator:
/// "/home/me/train+0x4f1a in step(long)", PyTorch's own as "torch/lib/libtorch_cpu.so+0x… in …". Milliseconds.
std::string describe_calls(const NativeStack& stack);

}  // namespace oomdiag
