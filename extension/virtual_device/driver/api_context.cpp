// Contexts (context.h): the primary one of a device, counted by who retains it, and those that programs create.

#include <cuda.h>

#include <vector>

#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/clock.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/limits.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/pool.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::check_context;
using oomdiag::Context;
using oomdiag::context_handle;
using oomdiag::current_context;
using oomdiag::Device;
using oomdiag::find_context;
using oomdiag::find_device;

namespace {

/// What this thread pushed. Leaked: contexts may be popped while thread_local objects are destroyed (fork_and_exit.h).
std::vector<Context*>& pushed() {
  static thread_local auto& contexts = *new std::vector<Context*>;
  return contexts;
}

/// A context beside the primary one, which becomes current.
CUresult create_context(CUcontext* handle, CUdevice ordinal) {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  Context& context = oomdiag::add_context(*device);
  if (const CUresult error = oomdiag::make_context(context)) return error;
  *handle = context_handle(&context);
  return cuCtxPushCurrent(*handle);
}

/// The context behind a handle, or the current one for null.
Context* context_or_current(CUcontext handle) { return handle ? find_context(handle) : current_context(); }

CUresult synchronize(const Context* context) {
  if (const CUresult error = oomdiag_device_check_capture()) return error;
  if (!context || !context->is_alive) return check_context() ? check_context() : CUDA_ERROR_CONTEXT_IS_DESTROYED;
  oomdiag::wait_until(context->end_ns);
  oomdiag::trim_pools();
  return CUDA_SUCCESS;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
  Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (flags) *flags = 0;
  *active = !oomdiag::is_forked_child() && oomdiag::primary_context(*device).is_alive;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  OOMDIAG_OBSERVED(cuDevicePrimaryCtxRetain, context, ordinal);
  if (const CUresult error = oomdiag::check_initialized()) return error;
  Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  Context& primary = oomdiag::primary_context(*device);
  if (const CUresult error = oomdiag::make_context(primary)) return error;
  ++primary.references;
  *context = context_handle(&primary);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDevicePrimaryCtxReset(CUdevice ordinal) {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  oomdiag::destroy_context(oomdiag::primary_context(*device));
  return CUDA_SUCCESS;
}

/// The last release resets (cuda.h).
OOMDIAG_ENTRY_POINT CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal) {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  Context& primary = oomdiag::primary_context(*device);
  int references = primary.references;
  while (references > 0 && !primary.references.compare_exchange_weak(references, references - 1)) {
  }
  if (references == 0) return CUDA_ERROR_INVALID_CONTEXT;
  return references == 1 ? cuDevicePrimaryCtxReset(ordinal) : CUDA_SUCCESS;
}
#undef cuCtxCreate
OOMDIAG_ENTRY_POINT CUresult cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice ordinal) {
  OOMDIAG_OBSERVED(cuCtxCreate_v2, context, flags, ordinal);
  return create_context(context, ordinal);
}
OOMDIAG_ENTRY_POINT CUresult cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam*, int, unsigned flags,
                                            CUdevice ordinal) {
  return cuCtxCreate_v2(context, flags, ordinal);
}
OOMDIAG_ENTRY_POINT CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* parameters, unsigned flags,
                                            CUdevice ordinal) {
  OOMDIAG_OBSERVED(cuCtxCreate_v4, context, parameters, flags, ordinal);
  return create_context(context, ordinal);
}

/// Not for a primary one, which is released. Where it is current to other threads it stays so, and their calls fail (cuda.h).
OOMDIAG_ENTRY_POINT CUresult cuCtxDestroy(CUcontext handle) {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  Context* context = find_context(handle);
  const bool is_primary = context && context == &oomdiag::primary_context(*context->device);
  if (!context || is_primary || !context->is_alive) return CUDA_ERROR_INVALID_CONTEXT;
  if (oomdiag::chosen_context() == context) cuCtxPopCurrent(nullptr);
  oomdiag::destroy_context(*context);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_handle(oomdiag::chosen_context());
  return oomdiag::check_initialized();
}

OOMDIAG_ENTRY_POINT CUresult cuCtxSetCurrent(CUcontext handle) {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  Context* context = find_context(handle);
  if (handle && !context) return CUDA_ERROR_INVALID_CONTEXT;
  oomdiag::set_current_context(context);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxPushCurrent(CUcontext context) {
  Context* before = oomdiag::chosen_context();
  if (const CUresult error = cuCtxSetCurrent(context)) return error;
  pushed().push_back(before);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxPopCurrent(CUcontext* context) {
  if (!oomdiag::chosen_context()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = context_handle(oomdiag::chosen_context());
  oomdiag::set_current_context(pushed().empty() ? nullptr : pushed().back());
  if (!pushed().empty()) pushed().pop_back();
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetDevice(CUdevice* ordinal) {
  if (const CUresult error = check_context()) return error;
  *ordinal = current_context()->device->ordinal;
  return CUDA_SUCCESS;
}

/// Of a given context, or for null of the current one.
OOMDIAG_ENTRY_POINT CUresult cuCtxGetDevice_v2(CUdevice* ordinal, CUcontext handle) {
  if (!handle) return cuCtxGetDevice(ordinal);
  const Context* context = find_context(handle);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  *ordinal = context->device->ordinal;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxSynchronize() { return synchronize(current_context()); }
OOMDIAG_ENTRY_POINT CUresult cuCtxSynchronize_v2(CUcontext context) { return synchronize(context_or_current(context)); }

OOMDIAG_ENTRY_POINT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  if (const CUresult error = check_context()) return error;
  if (limit < 0 || limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  std::lock_guard guard(oomdiag::memory_lock());
  *value = current_context()->limits.values[limit];
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  if (const CUresult error = check_context()) return error;
  if (limit < 0 || limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  return oomdiag::set_limit(*current_context(), limit, value);
}

OOMDIAG_ENTRY_POINT CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned) {
  const Context* peer = find_context(handle);
  if (!current_context() || !peer) return CUDA_ERROR_INVALID_CONTEXT;
  Device& device = *current_context()->device;
  int can = 0;
  cuDeviceCanAccessPeer(&can, device.ordinal, peer->device->ordinal);
  if (!can) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const uint32_t bit = 1u << peer->device->ordinal;
  return device.peers.fetch_or(bit) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuCtxDisablePeerAccess(CUcontext handle) {
  const Context* peer = find_context(handle);
  if (!current_context() || !peer) return CUDA_ERROR_INVALID_CONTEXT;
  const uint32_t bit = 1u << peer->device->ordinal;
  return current_context()->device->peers.fetch_and(~bit) & bit ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
  const Context* context = context_or_current(handle);
  if (!context) return handle ? CUDA_ERROR_INVALID_CONTEXT : check_context();
  *id = context->id;
  return CUDA_SUCCESS;
}

CUresult oomdiag_device_use_library() {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  if (const CUresult error = check_context()) return error;
  return oomdiag::load_kernels(*current_context());
}
