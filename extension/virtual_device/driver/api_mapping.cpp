// Virtual memory management (mapping.h), and sharing pages between processes as far as one process sees it.

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/mapping.h"
#include "extension/virtual_device/driver/small_heap.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::Device;

OOMDIAG_ENTRY_POINT CUresult cuMemAddressReserve(CUdeviceptr* begin, size_t bytes, size_t, CUdeviceptr,
                                                 unsigned long long) {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  return oomdiag::reserve_addresses(static_cast<int64_t>(bytes), begin);
}

OOMDIAG_ENTRY_POINT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                                         const CUmemAllocationProp* requested_properties, unsigned long long flags) {
  OOMDIAG_OBSERVED(cuMemCreate, handle, bytes, requested_properties, flags);
  if (const CUresult error = oomdiag::check_initialized()) return error;
  const bool is_on_gpu = requested_properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  Device* device = is_on_gpu ? oomdiag::find_device(requested_properties->location.id) : nullptr;
  if (is_on_gpu && !device) return CUDA_ERROR_INVALID_DEVICE;
  return oomdiag::create_pages(device, static_cast<int64_t>(bytes), handle);
}

OOMDIAG_ENTRY_POINT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  OOMDIAG_OBSERVED(cuMemRelease, handle);
  return oomdiag::release_pages(handle);
}

OOMDIAG_ENTRY_POINT CUresult cuMemMap(CUdeviceptr begin, size_t bytes, size_t offset,
                                      CUmemGenericAllocationHandle handle, unsigned long long flags) {
  OOMDIAG_OBSERVED(cuMemMap, begin, bytes, offset, handle, flags);
  if (offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;  // "currently must be zero" (cuda.h)
  return oomdiag::map_pages(begin, static_cast<int64_t>(bytes), handle);
}

OOMDIAG_ENTRY_POINT CUresult cuMemUnmap(CUdeviceptr begin, size_t bytes) {
  OOMDIAG_OBSERVED(cuMemUnmap, begin, bytes);
  return oomdiag::unmap_pages(begin, static_cast<int64_t>(bytes));
}

OOMDIAG_ENTRY_POINT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  OOMDIAG_OBSERVED(cuMemRetainAllocationHandle, handle, address);
  return oomdiag::retain_pages(reinterpret_cast<uintptr_t>(address), handle);
}

OOMDIAG_ENTRY_POINT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                                    CUmemGenericAllocationHandle handle) {
  const auto pages = oomdiag::find_pages(handle);
  if (!pages) return CUDA_ERROR_INVALID_VALUE;
  *properties = {};
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->location.type = pages->device < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  properties->location.id = pages->device < 0 ? 0 : pages->device;
  return CUDA_SUCCESS;
}

/// A file descriptor of the size of the pages: what a neighbour needs to know of them.
OOMDIAG_ENTRY_POINT CUresult cuMemExportToShareableHandle(void* shared, CUmemGenericAllocationHandle handle,
                                                          CUmemAllocationHandleType type, unsigned long long) {
  const auto pages = oomdiag::find_pages(handle);
  if (!pages) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  const int file = memfd_create("oomdiag-pages", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  if (ftruncate(file, pages->bytes)) {
    close(file);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  *static_cast<int*>(shared) = file;
  return CUDA_SUCCESS;
}

/// The exporter's GPU is charged, not ours a second time.
OOMDIAG_ENTRY_POINT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shared,
                                                            CUmemAllocationHandleType type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  const off_t bytes = lseek(static_cast<int>(reinterpret_cast<intptr_t>(shared)), 0, SEEK_END);
  return bytes < 0 ? CUDA_ERROR_INVALID_VALUE : oomdiag::create_pages(nullptr, bytes, handle);
}
