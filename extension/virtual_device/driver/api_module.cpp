// Modules, libraries, kernels and their launch. Code is never looked at, so every load succeeds and every name exists:
// cuDNN's engines that are compiled at run time and Triton need that, and give up otherwise.

#include <cuda.h>

#include <algorithm>
#include <cstdio>

#include "extension/virtual_device/driver/arguments.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/memory.h"

using oomdiag::current_device;
using oomdiag::Device;

namespace {

constexpr int64_t kGlobalBytes = 64 << 10;

/// A module, library, kernel or function: whatever handle is asked for. Nobody may look behind it.
template <typename Handle>
CUresult give_token(Handle* handle) {
  static char token;
  *handle = reinterpret_cast<Handle>(&token);
  return CUDA_SUCCESS;
}

/// One range for all global variables of all modules: their contents are never computed.
CUresult give_global(CUdeviceptr* address, size_t* bytes) {
  static void* block = nullptr;
  static const CUresult result = oomdiag::allocate_managed(0, kGlobalBytes, &block);
  if (address) *address = reinterpret_cast<CUdeviceptr>(block);
  if (bytes) *bytes = kGlobalBytes;
  return result;
}

int function_attribute(CUfunction_attribute attribute) {
  const Device* device = current_device();
  switch (static_cast<int>(attribute)) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      return 32;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      return device ? device->architecture : 0;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      return device ? device->card.shared_bytes_per_block : 0;
    default:
      return 0;
  }
}

/// Sizes of a grid of blocks, or of a block of threads.
double count(unsigned x, unsigned y, unsigned z) { return double{1} * x * y * z; }

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuModuleLoad(CUmodule* module, const char*) { return give_token(module); }
OOMDIAG_ENTRY_POINT CUresult cuModuleLoadData(CUmodule* module, const void*) { return give_token(module); }
OOMDIAG_ENTRY_POINT CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return give_token(module);
}
OOMDIAG_ENTRY_POINT CUresult cuModuleLoadFatBinary(CUmodule* module, const void*) { return give_token(module); }
OOMDIAG_ENTRY_POINT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  return give_token(function);
}
OOMDIAG_ENTRY_POINT CUresult cuModuleGetGlobal(CUdeviceptr* address, size_t* bytes, CUmodule, const char*) {
  return give_global(address, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  *mode = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuLibraryLoadData(CUlibrary* library, const void*, CUjit_option*, void**, unsigned,
                                               CUlibraryOption*, void**, unsigned) {
  return give_token(library);
}
OOMDIAG_ENTRY_POINT CUresult cuLibraryLoadFromFile(CUlibrary* library, const char*, CUjit_option*, void**, unsigned,
                                                   CUlibraryOption*, void**, unsigned) {
  return give_token(library);
}
OOMDIAG_ENTRY_POINT CUresult cuLibraryUnload(CUlibrary) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char*) { return give_token(kernel); }
OOMDIAG_ENTRY_POINT CUresult cuLibraryGetModule(CUmodule* module, CUlibrary) { return give_token(module); }
OOMDIAG_ENTRY_POINT CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary, const char*) {
  return give_global(address, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuLibraryGetManaged(CUdeviceptr* address, size_t* bytes, CUlibrary, const char*) {
  return give_global(address, bytes);
}

OOMDIAG_ENTRY_POINT CUresult cuKernelGetFunction(CUfunction* function, CUkernel) { return give_token(function); }
OOMDIAG_ENTRY_POINT CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel, CUdevice) {
  *value = function_attribute(attribute);
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuKernelSetAttribute(CUfunction_attribute, int, CUkernel, CUdevice) {
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuKernelSetCacheConfig(CUkernel, CUfunc_cache, CUdevice) { return CUDA_SUCCESS; }

OOMDIAG_ENTRY_POINT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = function_attribute(attribute);
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuFuncGetModule(CUmodule* module, CUfunction) { return give_token(module); }
OOMDIAG_ENTRY_POINT CUresult cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction) {
  *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuFuncGetName(const char** name, CUfunction) {
  *name = "unknown";
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuLaunchKernel(CUfunction, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned,
                                            CUstream stream, void** arguments, void**) {
  oomdiag::forget_arguments(arguments);
  return oomdiag_device_launch(stream, count(grid_x, grid_y, grid_z) * count(block_x, block_y, block_z));
}
OOMDIAG_ENTRY_POINT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                                              void** extra) {
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                        config->blockDimY, config->blockDimZ, 0, config->hStream, arguments, extra);
}
OOMDIAG_ENTRY_POINT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                                       unsigned grid_z, unsigned block_x, unsigned block_y,
                                                       unsigned block_z, unsigned bytes, CUstream stream,
                                                       void** arguments) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, bytes, stream, arguments, nullptr);
}

/// By threads and the shared memory that the launch asks for; what registers and a kernel's own shared memory allow is in
/// its code, which is not looked at.
OOMDIAG_ENTRY_POINT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads,
                                                                         size_t bytes) {
  const Device* device = current_device();
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  const oomdiag::Card& card = device->card;
  const auto shared = static_cast<int64_t>(bytes) + card.reserved_shared_bytes_per_block;
  int64_t fitting = threads > 0 ? card.threads_per_multiprocessor / threads : 1;
  if (bytes > 0) fitting = std::min(fitting, card.shared_bytes_per_multiprocessor / shared);
  if (bytes > static_cast<size_t>(card.shared_bytes_per_block_optin)) fitting = 0;
  *blocks = static_cast<int>(std::clamp<int64_t>(fitting, bytes > 0 ? 0 : 1, card.blocks_per_multiprocessor));
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function,
                                                                                  int threads, size_t bytes, unsigned) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction, CUoccupancyB2DSize,
                                                              size_t, int) {
  const Device* device = current_device();
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  *grid = device->card.multiprocessors;
  *block = 1024;
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuOccupancyMaxPotentialClusterSize(int* size, CUfunction, const CUlaunchConfig*) {
  *size = 8;
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction, int, int) {
  const Device* device = current_device();
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  *bytes = static_cast<size_t>(device->card.shared_bytes_per_block);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                                    const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                                    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
