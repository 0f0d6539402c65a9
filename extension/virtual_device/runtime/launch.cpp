// Kernels: their registration by code that nvcc made, their attributes, their launch. The functions with two
// underscores are declared in crt/host_runtime.h and crt/device_functions.h, which such code includes.

#include <algorithm>
#include <climits>
#include <cstring>
#include <mutex>
#include <vector>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/launch_bounds.h"
#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/runtime/forward.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::in_context;
using oomdiag::report;

namespace {

struct Kernel {
  const void* stub;
  const char* name;
};

// A wheel registers some 20 000 kernels while it loads, so that this only appends. Never destroyed.
auto& lock = *new oomdiag::LibraryLock;
auto& kernels = *new std::vector<Kernel>;
const void* spin = nullptr;  // PyTorch's kernel behind torch.cuda._sleep, which takes the cycles that it is given

struct CallConfiguration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};
thread_local CallConfiguration configuration;

/// The driver's handle of a kernel: what the program calls it by (module.h).
CUfunction function_of(const void* kernel) { return reinterpret_cast<CUfunction>(const_cast<void*>(kernel)); }

oomdiag::Shape shape(dim3 size) { return {size.x, size.y, size.z}; }

}  // namespace

/// The driver's launch, whose error for a shape is another.
cudaError_t oomdiag::launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, void** arguments,
                            cudaStream_t stream) {
  if (!is_launchable(shape(grid), shape(block))) return report(cudaErrorInvalidConfiguration);
  return in_context([&] {
    if (spin && kernel == spin) return oomdiag_device_spin(stream, *static_cast<const int64_t*>(arguments[0]));
    const auto shared = static_cast<unsigned>(std::min<size_t>(shared_bytes, UINT_MAX));
    return cuLaunchKernel(function_of(kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream,
                          arguments, nullptr);
  });
}

OOMDIAG_ENTRY_POINT void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
OOMDIAG_ENTRY_POINT void __cudaRegisterFatBinaryEnd(void**) {}
OOMDIAG_ENTRY_POINT void __cudaUnregisterFatBinary(void**) {}
OOMDIAG_ENTRY_POINT char __cudaInitModule(void**) { return 1; }

OOMDIAG_ENTRY_POINT void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*,
                                                dim3*, dim3*, int*) {
  std::lock_guard guard(lock);
  kernels.push_back({stub, name});
  if (std::strstr(name, "spin_kernelEl")) spin = stub;
}

OOMDIAG_ENTRY_POINT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                                         CUstream_st* stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}

OOMDIAG_ENTRY_POINT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                                           void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

OOMDIAG_ENTRY_POINT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

OOMDIAG_ENTRY_POINT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                                   size_t shared_bytes, cudaStream_t stream) {
  return oomdiag::launch(kernel, grid, block, shared_bytes, arguments, stream);
}
OOMDIAG_ENTRY_POINT cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                                        size_t shared_bytes, cudaStream_t stream) {
  return oomdiag::launch(kernel, grid, block, shared_bytes, arguments, stream);
}

/// The architecture decides which tuning CUB takes, hence its scratch: it must be one that the wheel has code for.
OOMDIAG_ENTRY_POINT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  if (const CUresult error = oomdiag::initialize()) return report(error);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = oomdiag_device_architecture(oomdiag::current_ordinal());
  CUdevice device = oomdiag::current_ordinal();
  cuKernelGetAttribute(&attributes->maxDynamicSharedSizeBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                       reinterpret_cast<CUkernel>(function_of(kernel)), device);
  return cudaSuccess;
}
OOMDIAG_ENTRY_POINT cudaError_t cudaFuncGetName(const char** name, const void* stub) {
  std::lock_guard guard(lock);
  const auto found =
      std::find_if(kernels.begin(), kernels.end(), [stub](const Kernel& kernel) { return kernel.stub == stub; });
  *name = found == kernels.end() ? nullptr : found->name;
  return *name ? cudaSuccess : report(cudaErrorInvalidValue);
}
