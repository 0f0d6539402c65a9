// Modules, libraries and kernels (module.h; their launch: api_launch.cpp), and linking at run time.

#include <cuda.h>

#include <string>
#include <utility>

#include "extension/virtual_device/driver/code.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/module.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::Code;
using oomdiag::current_context;
using oomdiag::current_device;
using oomdiag::Device;

namespace {

template <typename Handle>
Handle handle_of(const void* object) {
  return reinterpret_cast<Handle>(const_cast<void*>(object));
}

/// A module of the current context, or a library, of what `read` reads.
template <typename Handle, typename Read>
CUresult load(Handle* handle, bool is_library, Read read) {
  if (const CUresult error = is_library ? oomdiag::check_initialized() : oomdiag::check_context()) return error;
  Code code;
  if (const CUresult error = read(code)) return error;
  *handle = handle_of<Handle>(oomdiag::add_module(std::move(code), is_library ? nullptr : current_context()));
  return CUDA_SUCCESS;
}

template <typename Handle>
CUresult load_data(Handle* handle, bool is_library, const void* image) {
  return load(handle, is_library, [image](Code& code) { return oomdiag::read_code(image, code); });
}

template <typename Handle>
CUresult load_file(Handle* handle, bool is_library, const char* path) {
  return load(handle, is_library, [path](Code& code) { return oomdiag::read_code_file(path, code); });
}

template <typename Handle>
CUresult give_kernel(Handle* handle, const void* module, const char* name) {
  const oomdiag::Kernel* kernel = nullptr;
  if (const CUresult error = oomdiag::find_kernel(module, name, &kernel)) return error;
  *handle = handle_of<Handle>(kernel);
  return CUDA_SUCCESS;
}

CUresult give_global(CUdeviceptr* address, size_t* bytes, const void* module, const char* name) {
  oomdiag::Global global;
  if (const CUresult error = oomdiag::find_global(module, name, &global)) return error;
  if (address) *address = global.address;
  if (bytes) *bytes = global.bytes;
  return CUDA_SUCCESS;
}

template <typename Handle>
CUresult give_module_of(Handle* handle, const void* kernel) {
  const oomdiag::Kernel* known = oomdiag::known_kernel(kernel);
  *handle = handle_of<Handle>(known ? known->module : nullptr);
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult give_name(const char** name, const void* kernel) {
  const oomdiag::Kernel* known = oomdiag::known_kernel(kernel);
  *name = known ? known->name.c_str() : "unknown";
  return CUDA_SUCCESS;
}

int function_attribute(const Device* device, CUfunction_attribute attribute, const void* kernel) {
  switch (static_cast<int>(attribute)) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      return 32;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      return device ? device->architecture : 0;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      return device ? oomdiag::dynamic_shared_bytes(device->gpu, kernel) : 0;
    default:
      return 0;
  }
}

/// As a driver that is older than an attribute answers for it. Triton 3.9 asks for one of later drivers, and sets the
/// dynamic shared memory only where that fails.
CUresult set_attribute(const Device* device, CUfunction_attribute attribute, const void* kernel, int value) {
  if (attribute < 0 || attribute >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  return oomdiag::set_dynamic_shared_bytes(device->gpu, kernel, value);
}

/// What is being linked: the names of all inputs, or that those of one are not known.
struct Link {
  Code code{.names = oomdiag::CodeNames{}};
  std::string result{};
};

Link* find_link(CUlinkState state) { return reinterpret_cast<Link*>(state); }

CUresult add_to(Link& link, CUresult error, Code input) {
  if (error) return error;
  if (!input.names) link.code.names.reset();
  if (!link.code.names) return CUDA_SUCCESS;
  link.code.names->kernels.merge(input.names->kernels);
  link.code.names->globals.merge(input.names->globals);
  return CUDA_SUCCESS;
}

/// Whether the names of such an input can be read: objects, archives and intermediate code are not looked at.
bool has_names(CUjitInputType type) {
  return type == CU_JIT_INPUT_CUBIN || type == CU_JIT_INPUT_PTX || type == CU_JIT_INPUT_FATBINARY;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuModuleLoad(CUmodule* module, const char* path) { return load_file(module, false, path); }
OOMDIAG_ENTRY_POINT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return load_data(module, false, image);
}
OOMDIAG_ENTRY_POINT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return give_kernel(function, module, name);
}
OOMDIAG_ENTRY_POINT CUresult cuModuleGetGlobal(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  return give_global(address, bytes, module, name);
}

OOMDIAG_ENTRY_POINT CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned,
                                               CUlibraryOption*, void**, unsigned) {
  return load_data(library, true, image);
}
OOMDIAG_ENTRY_POINT CUresult cuLibraryLoadFromFile(CUlibrary* library, const char* path, CUjit_option*, void**,
                                                   unsigned, CUlibraryOption*, void**, unsigned) {
  return load_file(library, true, path);
}

OOMDIAG_ENTRY_POINT CUresult cuKernelGetLibrary(CUlibrary* library, CUkernel kernel) {
  return give_module_of(library, kernel);
}
OOMDIAG_ENTRY_POINT CUresult cuKernelGetName(const char** name, CUkernel kernel) { return give_name(name, kernel); }
OOMDIAG_ENTRY_POINT CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel kernel,
                                                  CUdevice device) {
  *value = function_attribute(oomdiag::find_device(device), attribute, kernel);
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                                  CUdevice ordinal) {
  const Device* device = oomdiag::find_device(ordinal);
  return device ? set_attribute(device, attribute, kernel, value) : CUDA_ERROR_INVALID_DEVICE;
}
OOMDIAG_ENTRY_POINT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  *value = function_attribute(current_device(), attribute, function);
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  const CUresult error = oomdiag::check_context();
  return error ? error : set_attribute(current_device(), attribute, function, value);
}

OOMDIAG_ENTRY_POINT CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* state) {
  *state = reinterpret_cast<CUlinkState>(new Link);
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuLinkAddData(CUlinkState state, CUjitInputType type, void* data, size_t bytes,
                                           const char*, unsigned, CUjit_option*, void**) {
  Code code;
  if (!has_names(type)) return add_to(*find_link(state), CUDA_SUCCESS, code);
  std::string image(static_cast<const char*>(data), bytes);
  image.append(sizeof(uint64_t), '\0');  // PTX need not end with 0
  const CUresult error = oomdiag::read_code(image.data(), code);
  return add_to(*find_link(state), error, std::move(code));
}
OOMDIAG_ENTRY_POINT CUresult cuLinkAddFile(CUlinkState state, CUjitInputType type, const char* path, unsigned,
                                           CUjit_option*, void**) {
  Code code;
  CUresult error = oomdiag::read_code_file(path, code);
  if (error != CUDA_ERROR_FILE_NOT_FOUND && !has_names(type)) error = CUDA_SUCCESS;
  return add_to(*find_link(state), error, std::move(code));
}

/// The result has the names of the inputs; it lives as long as the state (cuda.h).
OOMDIAG_ENTRY_POINT CUresult cuLinkComplete(CUlinkState state, void** code, size_t* bytes) {
  std::string& result = find_link(state)->result;
  result = oomdiag::write_code(find_link(state)->code);
  if (code) *code = result.data();
  if (bytes) *bytes = result.size() + 1;
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuLinkDestroy(CUlinkState state) {
  delete find_link(state);
  return CUDA_SUCCESS;
}
