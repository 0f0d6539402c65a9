// Sharing blocks and events between processes, as far as one process sees it: what another card's owner is charged for
// is open.

#include <cuda.h>
#include <unistd.h>

#include <cstring>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/memory.h"

namespace {

struct SharedBlock {
  pid_t owner;
  int64_t bytes;
};

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr block) {
  const auto range = oomdiag::find_range(reinterpret_cast<void*>(block));
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  const SharedBlock shared{.owner = getpid(), .bytes = range->bytes};
  *handle = {};
  std::memcpy(handle, &shared, sizeof shared);
  return CUDA_SUCCESS;
}

/// The owner's card holds the bytes; here they are address space.
OOMDIAG_ENTRY_POINT CUresult cuIpcOpenMemHandle(CUdeviceptr* block, CUipcMemHandle handle, unsigned) {
  SharedBlock shared;
  std::memcpy(&shared, &handle, sizeof shared);
  if (shared.owner == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  oomdiag_device_note("estimate", "cuIpcOpenMemHandle");
  return oomdiag::allocate_managed(0, shared.bytes, reinterpret_cast<void**>(block));
}

OOMDIAG_ENTRY_POINT CUresult cuIpcCloseMemHandle(CUdeviceptr block) {
  return oomdiag::free_block(reinterpret_cast<void*>(block));
}

OOMDIAG_ENTRY_POINT CUresult cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent) {
  *handle = {};
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuIpcOpenEventHandle(CUevent* event, CUipcEventHandle) {
  return cuEventCreate(event, CU_EVENT_DISABLE_TIMING);
}
