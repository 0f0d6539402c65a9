#pragma once

#include <cuda.h>

#include <map>
#include <string>

#include "extension/virtual_device/device_files/gpu.h"
#include "extension/virtual_device/driver/code.h"
#include "extension/virtual_device/driver/context.h"

// Modules, libraries, their kernels and variables. A CUlibrary is a module too, and a CUkernel a CUfunction: both are the address
// of the object here. Handles that come from elsewhere, as the runtime's kernels (runtime/launch.cpp) do, are known by what was
// set of them and by nothing else.

namespace oomdiag {

struct Module;

struct Kernel {
  std::string name;
  Module* module = nullptr;
};

struct Global {
  CUdeviceptr address = 0;
  size_t bytes = 0;
};

/// A module or a library, and what was asked of it.
struct Module {
  Code code;
  Context* context = nullptr;
  std::map<std::string, Kernel> kernels{};
  std::map<std::string, Global> globals{};
};

/// All from any thread. A library is of no context.
Module* add_module(Code code, Context* context);
CUresult unload_module(const void* handle);
void unload_modules_of(const Context& context);

/// The kernel of that name; CUDA_ERROR_NOT_FOUND where the code is known to have none, CUDA_ERROR_INVALID_HANDLE for no module.
CUresult find_kernel(const void* module, const char* name, const Kernel** kernel);
CUresult find_global(const void* module, const char* name, Global* global);

/// What a handle stands for: its name and module; null for one from elsewhere.
const Kernel* known_kernel(const void* handle);

/// Dynamic shared memory that a block of the kernel may have: what was set (cuFuncSetAttribute), else the GPU's usual bound.
int dynamic_shared_bytes(const Gpu& gpu, const void* kernel);
CUresult set_dynamic_shared_bytes(const Gpu& gpu, const void* kernel, int bytes);

}  // namespace oomdiag
