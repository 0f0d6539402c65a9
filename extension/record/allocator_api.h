#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <utility>

// The allocator's functions that are not the same in every torch from 2.6 on. Templates, so that what a version lacks is not
// compiled there.

namespace oomdiag {

namespace allocator = c10::cuda::CUDACachingAllocator;

/// A pair of numbers, whose name moved to c10 in 2.9.
using PoolId = decltype(allocator::SegmentInfo::owner_private_pool_id);

/// All segments with their blocks; without the history of the allocator where that can be left out.
template <class Allocator>
allocator::SnapshotInfo take_snapshot(Allocator& of) {
  constexpr PoolId kAllPools{0, 0};
  if constexpr (requires { of.snapshot(kAllPools, false); }) {
    return of.snapshot(kAllPools, false);
  } else if constexpr (requires { of.snapshot(kAllPools); }) {
    return of.snapshot(kAllPools);  // to 2.9
  } else {
    return of.snapshot();  // to 2.6
  }
}

/// Whether the program has PyTorch keep a history of the allocator (torch.cuda.memory._record_memory_history), where each
/// snapshot is an entry.
template <class Allocator>
bool keeps_history(Allocator& of) {
  if constexpr (requires { of.isHistoryEnabled(); }) {
    return of.isHistoryEnabled();
  } else {
    return true;
  }
}

/// Free and all bytes of a GPU.
template <class Allocator>
std::pair<size_t, size_t> read_gpu_memory(Allocator& of, c10::DeviceIndex device) {
  if constexpr (requires { of.getMemoryInfo(device); }) {
    return of.getMemoryInfo(device);
  } else {
    std::pair<size_t, size_t> result{};
    const c10::DeviceIndex before = c10::cuda::current_device();
    c10::cuda::set_device(device);
    cudaMemGetInfo(&result.first, &result.second);
    c10::cuda::set_device(before);
    return result;
  }
}

/// The private pool that an entry belongs to; none where torch does not say, to 2.6.
template <class Entry>
PoolId pool_of(const Entry& entry) {
  if constexpr (requires { entry.mempool_; }) {
    return entry.mempool_;
  } else {
    return {0, 0};
  }
}

}  // namespace oomdiag
