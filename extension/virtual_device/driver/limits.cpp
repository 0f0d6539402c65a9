#include "extension/virtual_device/driver/limits.h"

#include <algorithm>

#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/small_heap.h"

namespace oomdiag {
namespace {

/// What so many bytes beyond the default take.
int64_t extra_bytes(const Device& device, const Limits& limits, CUlimit limit) {
  static const Limits usual;
  const int64_t threads = int64_t{device.gpu.multiprocessors} * device.gpu.threads_per_multiprocessor;
  const auto extra = static_cast<int64_t>(limits.values[limit]) - static_cast<int64_t>(usual.values[limit]);
  return std::max<int64_t>(extra, 0) * (limit == CU_LIMIT_STACK_SIZE ? threads : 1);
}

int64_t bytes_of(const Device& device, const Limits& limits) {
  int64_t sum = 0;
  for (const CUlimit limit : {CU_LIMIT_STACK_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE}) {
    sum += round_to_pages(extra_bytes(device, limits, limit));
  }
  return sum;
}

}  // namespace

CUresult set_limit(Context& context, CUlimit limit, size_t value) {
  Device& device = *context.device;
  int64_t more = 0;
  {
    std::lock_guard guard(memory_lock());
    Limits requested = context.limits;
    requested.values[limit] = std::min<size_t>(value, size_t{1} << 40);
    more = bytes_of(device, requested) - bytes_of(device, context.limits);
    if (more < 0) refund(device, -more);
    if (more <= 0 || charge(device, more)) {
      context.limits = requested;
      return CUDA_SUCCESS;
    }
  }
  notify_oom(more);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

void refund_limits(Context& context) {
  std::lock_guard guard(memory_lock());
  refund(*context.device, bytes_of(*context.device, context.limits));
  context.limits = {};
}

}  // namespace oomdiag
