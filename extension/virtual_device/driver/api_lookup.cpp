// How others find the driver's functions, and the names of its errors.

#include <cuda.h>
#include <dlfcn.h>

#include <string>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/errors.h"

namespace {

/// This library itself: a lookup in the global scope could find another libcuda, or the recorder's shim.
void* own_library() {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return library ? library : RTLD_DEFAULT;
}

/// The newest version of a function, as headers of CUDA 13 name it; stubs count as present, they answer "not
/// supported".
void* find_function(const char* name) {
  for (const char* version : {"_v4", "_v3", "_v2", ""}) {
    if (void* function = dlsym(own_library(), (std::string(name) + version).c_str())) return function;
  }
  return nullptr;
}

CUresult answer(const char* (*pick)(const oomdiag::ErrorText&), CUresult code, const char** text) {
  const oomdiag::ErrorText* error = oomdiag::find_error(code);
  *text = error ? pick(*error) : nullptr;
  return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t,
                                              CUdriverProcAddressQueryResult* status) {
  *function = find_function(name);
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress  // cuda.h gave the name to the five-argument form above
OOMDIAG_ENTRY_POINT CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

/// Undocumented tables are never served: NVIDIA libraries with a runtime of their own then fail
/// cleanly.
OOMDIAG_ENTRY_POINT CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

OOMDIAG_ENTRY_POINT CUresult cuGetErrorString(CUresult code, const char** text) {
  return answer([](const oomdiag::ErrorText& error) { return error.text; }, code, text);
}

OOMDIAG_ENTRY_POINT CUresult cuGetErrorName(CUresult code, const char** text) {
  return answer([](const oomdiag::ErrorText& error) { return error.driver_name; }, code, text);
}

// The driver's error log: the virtual device writes none, so that nobody is ever called.

OOMDIAG_ENTRY_POINT CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* handle) {
  if (handle) *handle = nullptr;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
