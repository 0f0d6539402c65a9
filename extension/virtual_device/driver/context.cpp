#include "extension/virtual_device/driver/context.h"

#include <algorithm>
#include <array>
#include <vector>

#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/limits.h"
#include "extension/virtual_device/driver/mapping.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/module.h"
#include "extension/virtual_device/driver/small_heap.h"
#include "extension/virtual_device/driver/stream.h"

namespace oomdiag {
namespace {

// Never destroyed, under stream_lock().
auto& contexts = *new std::vector<Context*>;

thread_local Context* current = nullptr;

Context* new_context(Device* device) {
  auto* context = new Context{.device = device};
  context->legacy_stream = new Stream{.context = context};
  std::lock_guard guard(stream_lock());
  contexts.push_back(context);
  context->id = contexts.size();
  return context;
}

bool is_primary(const Context& context) { return &context == &primary_context(*context.device); }

/// What a context takes of the GPU once: itself, its first code. `is_there` says that it was.
CUresult charge_once(Context& context, std::atomic<bool>& is_there, int64_t bytes, CUpti_CallbackIdResource what) {
  {
    std::lock_guard guard(memory_lock());
    if (is_there) return CUDA_SUCCESS;
    is_there = charge(*context.device, bytes);
  }
  if (!is_there) notify_oom(bytes);
  if (!is_there) return CUDA_ERROR_OUT_OF_MEMORY;
  notify_resource(what, &context);
  return CUDA_SUCCESS;
}

void refund_shares(Context& context) {
  Device& device = *context.device;
  refund_limits(context);
  std::lock_guard guard(memory_lock());
  refund(device, round_to_pages(context.graph_bytes));
  context.graph_bytes = 0;
  if (context.has_kernels.exchange(false)) refund(device, device.gpu.first_kernel_bytes);
  if (context.is_alive.exchange(false)) refund(device, device.gpu.context_bytes);
}

}  // namespace

Context* find_context(CUcontext handle) noexcept {
  std::lock_guard guard(stream_lock());
  for (Context* context : contexts) {
    if (context_handle(context) == handle) return context;
  }
  return nullptr;
}

Context& primary_context(Device& device) noexcept {
  static auto& primaries = *new std::array<std::atomic<Context*>, kMaxVirtualDevices>;
  auto& primary = primaries[static_cast<size_t>(device.index)];
  if (Context* made = primary.load(std::memory_order_acquire)) return *made;
  std::lock_guard guard(stream_lock());
  if (!primary.load()) primary.store(new_context(&device), std::memory_order_release);
  return *primary.load();
}

Context* chosen_context() noexcept { return current; }

Context* current_context() noexcept {
  return current && current->is_alive.load(std::memory_order_relaxed) ? current : nullptr;
}

Device* current_device() noexcept {
  const Context* context = current_context();
  return context ? context->device : nullptr;
}

void set_current_context(Context* context) noexcept { current = context; }

CUresult check_context() noexcept {
  if (current_context()) return CUDA_SUCCESS;
  return current ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
}

Context& context_on(Device& device) noexcept {
  Context* context = current_context();
  return context && context->device == &device ? *context : primary_context(device);
}

Context& add_context(Device& device) { return *new_context(&device); }

CUresult make_context(Context& context) {
  if (context.is_alive.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  return charge_once(context, context.is_alive, context.device->gpu.context_bytes, CUPTI_CBID_RESOURCE_CONTEXT_CREATED);
}

CUresult load_kernels(Context& context) {
  if (context.has_kernels.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  if (const CUresult error = make_context(context)) return error;
  return charge_once(context, context.has_kernels, context.device->gpu.first_kernel_bytes,
                     CUPTI_CBID_RESOURCE_MODULE_LOADED);
}

bool holds_context(const Device& device) {
  std::lock_guard guard(stream_lock());
  return std::ranges::any_of(contexts, [&](const Context* one) { return one->device == &device && one->is_alive; });
}

void destroy_context(Context& context) {
  if (!context.is_alive) return;
  notify_resource(CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING, &context);
  drop_streams_of(context);
  unload_modules_of(context);
  free_memory_of(context);
  if (is_primary(context)) {
    free_pools_of(*context.device);
    release_pages_of(*context.device);
    context.device->peers = 0;
  }
  refund_shares(context);
  ++context.times_destroyed;
}

}  // namespace oomdiag
