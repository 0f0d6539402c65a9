#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>

namespace oomdiag {

struct Context;

/// The limits of a context, with the defaults that cuda.h and the programming guide give for a stack and the two heaps.
struct Limits {
  std::array<size_t, CU_LIMIT_MAX> values = [] {
    std::array<size_t, CU_LIMIT_MAX> usual{};
    usual[CU_LIMIT_STACK_SIZE] = 1 << 10;
    usual[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20;
    usual[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
    return usual;
  }();
};

/// Sets a limit. What it takes of the GPU above the default, which every context includes, is taken at once: the heaps, and
/// a stack for each thread that may be resident. CUDA_ERROR_OUT_OF_MEMORY where the GPU has not so much.
CUresult set_limit(Context& context, CUlimit limit, size_t value);

/// All limits are the defaults again, and the GPU has back what they took.
void refund_limits(Context& context);

}  // namespace oomdiag
