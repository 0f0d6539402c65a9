#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>

#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/memory.h"

// Virtual memory management, as PyTorch's expandable segments use it: address space is reserved once, physical pages
// are made as handles, and a handle is mapped into the space. The pages are charged while anyone holds the handle:
// cuMemRelease gives up the creator's reference, each mapping has one of its own, and the bytes return when the last
// goes.

namespace oomdiag {

using PhysicalHandle = CUmemGenericAllocationHandle;

/// What a handle stands for; `device` is -1 for pages that no GPU of ours is charged for (host, imported).
struct PhysicalPages {
  int64_t bytes = 0;
  int device = -1;
  int references = 1;
};

CUresult reserve_addresses(int64_t bytes, CUdeviceptr* begin);
CUresult free_addresses(CUdeviceptr begin, int64_t bytes);

/// Pages of `device`, or of no GPU for a null one.
CUresult create_pages(Device* device, int64_t bytes, PhysicalHandle* handle);
CUresult release_pages(PhysicalHandle handle);

/// CUDA_ERROR_INVALID_VALUE unless the range is whole pages of one reservation, none of them mapped, and the handle has so many.
CUresult map_pages(CUdeviceptr begin, int64_t bytes, PhysicalHandle handle);

/// CUDA_ERROR_INVALID_VALUE unless the range is one or more whole mappings without a gap.
CUresult unmap_pages(CUdeviceptr begin, int64_t bytes);

/// One more reference to the pages mapped at `address`.
CUresult retain_pages(uintptr_t address, PhysicalHandle* handle);

/// All handles of the device and what is mapped of them are gone.
void release_pages_of(Device& device);

std::optional<PhysicalPages> find_pages(PhysicalHandle handle);

/// The mapping that holds `address`. Under memory_lock().
std::optional<MemoryRange> find_mapping(uintptr_t address);

}  // namespace oomdiag
