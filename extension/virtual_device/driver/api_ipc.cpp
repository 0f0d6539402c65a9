// Sharing blocks and events between processes. The process that shares a block is charged for it (shared_gpus.h), the
// others see address space of the same size. Contents do not go over: what is read there is a kernel's, as far as is known.

#include <cuda.h>
#include <unistd.h>

#include <cstring>

#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/entry_point.h"

namespace {

struct SharedBlock {
  pid_t owner;
  int gpu;  ///< its place in the machine: each process may call it differently
  int64_t bytes;
};

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr block) {
  const auto range = oomdiag::find_range(reinterpret_cast<void*>(block));
  const oomdiag::Device* device = range ? oomdiag::find_device(range->device) : nullptr;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  const SharedBlock shared{.owner = getpid(), .gpu = device->index, .bytes = range->bytes};
  *handle = {};
  std::memcpy(handle, &shared, sizeof shared);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuIpcOpenMemHandle(CUdeviceptr* block, CUipcMemHandle handle, unsigned) {
  SharedBlock shared;
  std::memcpy(&shared, &handle, sizeof shared);
  if (shared.owner == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  oomdiag::Device* device = oomdiag::find_installed(shared.gpu);
  if (!device || device->ordinal < 0 || shared.bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  return oomdiag::import_block(*device, shared.bytes, reinterpret_cast<void**>(block));
}
