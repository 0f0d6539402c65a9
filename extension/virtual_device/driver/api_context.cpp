// Contexts. A device has its primary context and no other; its handle is the device. A context exists from its first
// retain on, and stays: releasing it is what happens at the end of a process.

#include <cuda.h>

#include <vector>

#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/clock.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"

using oomdiag::current_device;
using oomdiag::Device;
using oomdiag::find_device;

namespace {

thread_local std::vector<Device*> pushed;

CUcontext context_of(Device* device) { return reinterpret_cast<CUcontext>(device); }
Device* device_of(CUcontext context) { return reinterpret_cast<Device*>(context); }

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
  const Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (flags) *flags = 0;
  *active = !oomdiag::is_forked_child() && device->has_context.load(std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  OOMDIAG_OBSERVED(cuDevicePrimaryCtxRetain, context, ordinal);
  if (const CUresult error = oomdiag::check_initialized()) return error;
  Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (const CUresult error = oomdiag::make_context(*device)) return error;
  *context = context_of(device);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuDevicePrimaryCtxSetFlags(CUdevice, unsigned) { return CUDA_SUCCESS; }

OOMDIAG_ENTRY_POINT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current_device());
  return oomdiag::check_initialized();
}

OOMDIAG_ENTRY_POINT CUresult cuCtxSetCurrent(CUcontext context) {
  oomdiag::set_current_device(device_of(context));
  return oomdiag::check_initialized();
}

OOMDIAG_ENTRY_POINT CUresult cuCtxPushCurrent(CUcontext context) {
  pushed.push_back(current_device());
  return cuCtxSetCurrent(context);
}

OOMDIAG_ENTRY_POINT CUresult cuCtxPopCurrent(CUcontext* context) {
  if (!current_device()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = context_of(current_device());
  oomdiag::set_current_device(pushed.empty() ? nullptr : pushed.back());
  if (!pushed.empty()) pushed.pop_back();
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetDevice(CUdevice* ordinal) {
  const Device* device = current_device();
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  *ordinal = device->ordinal;
  return CUDA_SUCCESS;
}

/// Of a given context, or for null of the current one.
OOMDIAG_ENTRY_POINT CUresult cuCtxGetDevice_v2(CUdevice* ordinal, CUcontext context) {
  if (!context) return cuCtxGetDevice(ordinal);
  *ordinal = device_of(context)->ordinal;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxSynchronize() {
  if (const CUresult error = oomdiag_device_check_capture()) return error;
  if (!current_device()) return CUDA_ERROR_INVALID_CONTEXT;
  oomdiag::wait_until(current_device()->end_ns);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetApiVersion(CUcontext, unsigned* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  const Device* device = current_device();
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  if (limit < 0 || limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  std::lock_guard guard(oomdiag::memory_lock());
  *value = device->limits.values[limit];
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  if (!current_device()) return CUDA_ERROR_INVALID_CONTEXT;
  if (limit < 0 || limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  return oomdiag::set_limit(*current_device(), limit, value);
}

OOMDIAG_ENTRY_POINT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
  Device* device = current_device();
  if (!device || !peer) return CUDA_ERROR_INVALID_CONTEXT;
  int can = 0;
  cuDeviceCanAccessPeer(&can, device->ordinal, device_of(peer)->ordinal);
  if (!can) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const uint32_t bit = 1u << device_of(peer)->ordinal;
  return device->peers.fetch_or(bit) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  Device* device = current_device();
  if (!device || !peer) return CUDA_ERROR_INVALID_CONTEXT;
  const uint32_t bit = 1u << device_of(peer)->ordinal;
  return device->peers.fetch_and(~bit) & bit ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetFlags(unsigned* flags) {
  *flags = 0;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
  const Device* device = context ? device_of(context) : current_device();
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  *id = static_cast<unsigned long long>(device->ordinal) + 1;
  return CUDA_SUCCESS;
}

CUresult oomdiag_device_use_library() {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  Device* device = current_device();
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  return oomdiag::load_kernels(*device);
}
