// How others find the driver's functions, and the names of its errors.

#include <cuda.h>
#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <string>
#include <string_view>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/errors.h"
#include "extension/virtual_device/entry_point.h"
#include "profiler/package_paths.h"

namespace {

/// A form of a function and the CUDA version that brought it; the newest form that a program's version has is its own.
struct Form {
  std::string_view function;
  int version;
  const char* symbol;
};
constexpr Form kForms[] = {
#include "driver_versions.inc"
};

/// This library itself: a lookup in the global scope could find another libcuda, or the recorder's shim. Stubs are found, too:
/// they answer "not supported".
void* find_symbol(const char* symbol) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return dlsym(library ? library : RTLD_DEFAULT, symbol);
}

/// What per-thread default streams would change is nothing here: the variants for them are the plain forms.
void* find_function(std::string_view name, int version, CUdriverProcAddressQueryResult& status) {
  const Form* newest = nullptr;
  bool is_known = false;
  for (const Form& form : kForms) {
    if (form.function != name) continue;
    is_known = true;
    if (form.version <= version) newest = &form;  // ascending
  }
  void* found = newest ? find_symbol(newest->symbol) : is_known ? nullptr : find_symbol(std::string(name).c_str());
  status = found      ? CU_GET_PROC_ADDRESS_SUCCESS
           : is_known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                      : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return found;
}

/// The file name of the library whose code called us; of an extension module of Python's, where it lies among the packages.
std::string_view name_caller(const void* address) {
  Dl_info info{};
  const std::string_view path = dladdr(address, &info) && info.dli_fname ? info.dli_fname : "a program";
  const size_t package = oomdiag::find_package(path);
  const bool is_module = package != path.npos && path.find(".cpython-") != path.npos;
  return path.substr(is_module ? package : path.rfind('/') + 1);
}

CUresult answer(const char* (*pick)(const oomdiag::ErrorText&), CUresult code, const char** text) {
  const oomdiag::ErrorText* error = oomdiag::find_error(code);
  *text = error ? pick(*error) : nullptr;
  return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t,
                                              CUdriverProcAddressQueryResult* status) {
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
  *function = find_function(name, version, found);
  if (status) *status = found;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress  // cuda.h gave the name to the five-argument form above
OOMDIAG_ENTRY_POINT CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

/// Undocumented tables are never served: libraries that bring a CUDA runtime of their own fail cleanly, and are named.
OOMDIAG_ENTRY_POINT CUresult cuGetExportTable(const void** table, const CUuuid*) {
  static std::atomic<bool> is_noted = false;
  *table = nullptr;
  const std::string_view caller = name_caller(__builtin_return_address(0));
  // What cuDNN's plans take is counted in dnn/; NVRTC and nvJitLink compile as well without.
  const bool is_served =
      caller.starts_with("libcudnn") || caller.starts_with("libnvrtc") || caller.starts_with("libnvJitLink");
  if (is_served || is_noted.exchange(true)) return CUDA_ERROR_NOT_FOUND;
  const std::string text = std::string(caller) + ", which brings a CUDA runtime of its own";
  oomdiag_device_note("unsupported", strdup(text.c_str()));
  return CUDA_ERROR_NOT_FOUND;
}

OOMDIAG_ENTRY_POINT CUresult cuGetErrorString(CUresult code, const char** text) {
  return answer([](const oomdiag::ErrorText& error) { return error.text; }, code, text);
}

OOMDIAG_ENTRY_POINT CUresult cuGetErrorName(CUresult code, const char** text) {
  return answer([](const oomdiag::ErrorText& error) { return error.driver_name; }, code, text);
}

// The driver's error log: the virtual device writes none, so that nobody is ever called.
