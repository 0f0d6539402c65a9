#pragma once

#include <cstdint>

#include "extension/virtual_device/driver/locks.h"

// The memory account of a GPU. Everything that a GPU gives is charged here, and every charge can fail; nothing else keeps
// a count of the GPU. What is free (cudaMemGetInfo, NVML), what a process has and what is not PyTorch's are sums of what
// is charged and of the other processes' (shared_gpus.h). Charged are:
//
//   context    the primary context: cuDevicePrimaryCtxRetain         the GPU's data file; an estimate, but for measured GPUs
//   modules    code of the first kernel or library handle            the same
//   heaps      cudaDeviceSetLimit: malloc() and printf() of kernels, what is above the defaults, which the context includes
//              and their stacks
//   graphs     executables of captured graphs                        an estimate by the number of their kernels
//   blocks     cudaMalloc: whole pages, or small blocks that share   libraries' workspaces and communicators' buffers are such
//   pools      stream-ordered pools, what they keep included         blocks, and distinguished by the library that asks
//   mappings   cuMemCreate, while anybody holds the pages

namespace oomdiag {

struct Device;

/// Guards the memory accounts and the tables of memory.
MemoryLock& memory_lock() noexcept;

/// Takes `bytes` of the GPU; false when it has not so many left, by this process and the others. Under memory_lock().
bool charge(Device& device, int64_t bytes) noexcept;
void refund(Device& device, int64_t bytes) noexcept;

/// All that a GPU gives: its memory, and what Windows' driver puts into host memory beyond it.
int64_t capacity_of(const Device& device) noexcept;

/// What all processes, and Windows, hold of the GPU itself.
int64_t count_used_bytes(const Device& device) noexcept;
int64_t count_free_bytes(const Device& device) noexcept;

}  // namespace oomdiag
