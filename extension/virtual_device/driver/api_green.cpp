// Green contexts: a part of a GPU's multiprocessors. Work takes no part of them here, so that only their numbers matter; as a
// context, a green one is its device's primary one. What it takes of a GPU's memory is in no document.

#include <cuda.h>

#include <algorithm>

#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::Device;

namespace {

struct Green {
  Device* device;
  CUdevResource part;
};

Green* find_green(CUgreenCtx handle) { return reinterpret_cast<Green*>(handle); }

/// The least multiprocessors of a part, whose multiple a part is (CUDA driver API, cuDevSmResourceSplitByCount, 12.4: 2 of
/// 7.x, 4 in twos of 8.x, 8 of 9.0 and above).
unsigned least_part(const Device& device) {
  const int major = device.gpu.compute_major;
  return major >= 9 ? 8 : major == 8 ? 4 : 2;
}
unsigned alignment(const Device& device) { return device.gpu.compute_major >= 9 ? 8 : 2; }

CUdevResource part_of(const Device& device, unsigned count) {
  CUdevResource part{};
  part.type = count ? CU_DEV_RESOURCE_TYPE_SM : CU_DEV_RESOURCE_TYPE_INVALID;
  part.sm.smCount = count;
  part.sm.minSmPartitionSize = least_part(device);
  part.sm.smCoscheduledAlignment = alignment(device);
  return part;
}

CUresult give_whole(const Device* device, CUdevResource* resource, CUdevResourceType type) {
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (type == CU_DEV_RESOURCE_TYPE_SM) {
    *resource = part_of(*device, static_cast<unsigned>(device->gpu.multiprocessors));
    return CUDA_SUCCESS;
  }
#if CUDA_VERSION >= 13010
  if (type == CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG) {
    *resource = {};
    resource->type = type;
    resource->wqConfig.device = device->ordinal;
    return CUDA_SUCCESS;
  }
#endif
  return CUDA_ERROR_INVALID_RESOURCE_TYPE;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, CUdevResourceType type) {
  return give_whole(oomdiag::find_device(device), resource, type);
}
OOMDIAG_ENTRY_POINT CUresult cuCtxGetDevResource(CUcontext context, CUdevResource* resource, CUdevResourceType type) {
  const oomdiag::Context* found = oomdiag::find_context(context);
  return found ? give_whole(found->device, resource, type) : CUDA_ERROR_INVALID_CONTEXT;
}
OOMDIAG_ENTRY_POINT CUresult cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource* resource,
                                                      CUdevResourceType type) {
  if (type != CU_DEV_RESOURCE_TYPE_SM) return give_whole(find_green(green)->device, resource, type);
  *resource = find_green(green)->part;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDevSmResourceSplitByCount(CUdevResource* result, unsigned* groups,
                                                         const CUdevResource* input, CUdevResource* remainder,
                                                         unsigned flags, unsigned least) {
  const Device* device = oomdiag::current_device() ? oomdiag::current_device() : oomdiag::find_device(0);
  if (!device || !groups || least > input->sm.smCount) return CUDA_ERROR_INVALID_VALUE;
  if (input->type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  const unsigned step = flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING ? 2 : alignment(*device);
  const unsigned each = std::max((least + step - 1) / step * step, std::max(step, flags ? 2 : least_part(*device)));
  const unsigned most = input->sm.smCount / each;
  *groups = result ? std::min(*groups, most) : most;
  for (unsigned i = 0; result && i < *groups; ++i) result[i] = part_of(*device, each);
  if (result && remainder) *remainder = part_of(*device, input->sm.smCount - *groups * each);
  return CUDA_SUCCESS;
}

/// Descriptors are never given back (cuda.h has no call for it).
OOMDIAG_ENTRY_POINT CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* descriptor, CUdevResource* resources,
                                                       unsigned count) {
  if (count == 0) return CUDA_ERROR_INVALID_VALUE;
  auto* part = new CUdevResource(resources[0]);
  for (unsigned i = 0; i < count; ++i) {
    if (resources[i].type == CU_DEV_RESOURCE_TYPE_SM) *part = resources[i];
  }
  *descriptor = reinterpret_cast<CUdevResourceDesc>(part);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuGreenCtxCreate(CUgreenCtx* green, CUdevResourceDesc descriptor, CUdevice ordinal,
                                              unsigned) {
  Device* device = oomdiag::find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (const CUresult error = oomdiag::make_context(oomdiag::primary_context(*device))) return error;
  oomdiag_device_note("estimate",
                      "green contexts: what they take of a GPU's memory is not known and taken to be nothing");
  *green = reinterpret_cast<CUgreenCtx>(new Green{device, *reinterpret_cast<const CUdevResource*>(descriptor)});
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuGreenCtxDestroy(CUgreenCtx green) {
  delete find_green(green);
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuCtxFromGreenCtx(CUcontext* context, CUgreenCtx green) {
  *context = oomdiag::context_handle(&oomdiag::primary_context(*find_green(green)->device));
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx green, unsigned flags, int priority) {
  oomdiag::Context* before = oomdiag::chosen_context();
  oomdiag::set_current_context(&oomdiag::primary_context(*find_green(green)->device));
  const CUresult result = cuStreamCreateWithPriority(stream, flags, priority);
  oomdiag::set_current_context(before);
  return result;
}

/// A stream does not know of which green context it is.
OOMDIAG_ENTRY_POINT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green) {
  if (green) *green = nullptr;
  return cuStreamGetCtx(stream, context);
}
