// Launches of kernels, and how many blocks of one a multiprocessor takes.
//
// A launch is rejected as by a GPU: for its shape, and for more dynamic shared memory than the kernel has opted in to.
// What registers and a kernel's own shared memory allow is in its code, which is not
// looked at: occupancy is by threads, blocks and the shared memory that is asked for. CUB's sizes, which follow from it, were
// those of real GPUs in all recordings that were run again; a program that has a block size chosen by it finds a note
// in the report.

#include <cuda.h>

#include <algorithm>

#include "extension/virtual_device/driver/arguments.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/forward.h"
#include "extension/virtual_device/driver/launch_bounds.h"
#include "extension/virtual_device/driver/launch_observer.h"
#include "extension/virtual_device/driver/module.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::current_device;
using oomdiag::Device;

namespace {

constexpr int kWarp = 32;

/// Blocks of so many threads, each with so much dynamic shared memory, that one multiprocessor takes at once.
int count_blocks(const oomdiag::Gpu& gpu, int threads, size_t bytes) {
  if (bytes > static_cast<size_t>(gpu.shared_bytes_per_block_optin)) return 0;
  const auto shared = static_cast<int64_t>(bytes) + gpu.reserved_shared_bytes_per_block;
  int64_t fitting = threads > 0 ? gpu.threads_per_multiprocessor / threads : 1;
  if (bytes > 0) fitting = std::min(fitting, gpu.shared_bytes_per_multiprocessor / shared);
  return static_cast<int>(std::clamp<int64_t>(fitting, bytes > 0 ? 0 : 1, gpu.blocks_per_multiprocessor));
}

}  // namespace

namespace oomdiag {

CUresult launch(CUfunction kernel, Shape grid, Shape block, unsigned shared_bytes, CUstream stream, void** arguments) {
  const Device* device = current_device();
  if (!device) return check_context();
  const bool has_room = shared_bytes <= static_cast<unsigned>(device->gpu.shared_bytes_per_block) ||
                        shared_bytes <= static_cast<unsigned>(dynamic_shared_bytes(device->gpu, kernel));
  if (!has_room || !is_launchable(grid, block)) return CUDA_ERROR_INVALID_VALUE;
  forget_arguments(arguments);
  const auto threads = grid.count() * block.count();
  notify_launch(kernel, threads, arguments);
  return oomdiag_device_launch(stream, threads);
}

CUresult find_block(int* grid, int* block, CUoccupancyB2DSize shared_of, size_t shared_bytes, int most_threads) {
  const Device* device = current_device();
  if (!device) return check_context();
  oomdiag_device_note("estimate", "block sizes by occupancy: the registers of kernels are not known");
  int most_resident = 0;
  for (int threads = most_threads > 0 ? std::min(most_threads, 1024) : 1024; threads > 0;
       threads = (threads - 1) / kWarp * kWarp) {
    const int blocks = count_blocks(device->gpu, threads, shared_of ? shared_of(threads) : shared_bytes);
    if (blocks * threads <= most_resident) continue;
    most_resident = blocks * threads;
    *block = threads;
    *grid = blocks * device->gpu.multiprocessors;
  }
  return most_resident > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace oomdiag

OOMDIAG_ENTRY_POINT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction kernel, void** arguments,
                                              void**) {
  return oomdiag::launch(kernel, {config->gridDimX, config->gridDimY, config->gridDimZ},
                         {config->blockDimX, config->blockDimY, config->blockDimZ}, config->sharedMemBytes,
                         config->hStream, arguments);
}

OOMDIAG_ENTRY_POINT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads,
                                                                         size_t bytes) {
  const Device* device = current_device();
  if (!device) return oomdiag::check_context();
  *blocks = count_blocks(device->gpu, threads, bytes);
  return CUDA_SUCCESS;
}

/// What each of so many blocks on a multiprocessor may have, of what a kernel has that did not opt in to more.
OOMDIAG_ENTRY_POINT CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction, int blocks, int) {
  const Device* device = current_device();
  if (!device) return oomdiag::check_context();
  if (blocks < 1) return CUDA_ERROR_INVALID_VALUE;
  const oomdiag::Gpu& gpu = device->gpu;
  const int each = gpu.shared_bytes_per_multiprocessor / blocks - gpu.reserved_shared_bytes_per_block;
  *bytes = static_cast<size_t>(std::clamp(each, 0, gpu.shared_bytes_per_block));
  return CUDA_SUCCESS;
}
