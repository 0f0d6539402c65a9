// Modules, libraries and kernels (their launch: api_launch.cpp). Code is never looked at, so every load succeeds and every name exists:
// cuDNN's engines that are compiled at run time and Triton need that, and give up otherwise.

#include <cuda.h>

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

/// A kernel may ask for no more shared memory than the card lets a block opt in to (cuda.h, cuFuncSetAttribute).
CUresult check_attribute(const Device* device, CUfunction_attribute attribute, int value) {
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  const bool is_too_much =
      attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value > device->card.shared_bytes_per_block_optin;
  return is_too_much ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

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
OOMDIAG_ENTRY_POINT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel,
                                                  CUdevice device) {
  return check_attribute(oomdiag::find_device(device), attribute, value);
}
OOMDIAG_ENTRY_POINT CUresult cuKernelSetCacheConfig(CUkernel, CUfunc_cache, CUdevice) { return CUDA_SUCCESS; }

OOMDIAG_ENTRY_POINT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = function_attribute(attribute);
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  return check_attribute(current_device(), attribute, value);
}
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

OOMDIAG_ENTRY_POINT CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                                    const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                                    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
