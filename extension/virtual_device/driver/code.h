#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "extension/virtual_device/driver/kernel_traffic.h"

// What a module's code says of itself. PTX is text and a cubin is ELF, so that their names can be read; what a fat binary holds
// is not documented, and NVVM's and nvJitLink's forms are compiled later: there every name may exist.

namespace oomdiag {

struct CodeNames {
  std::set<std::string> kernels;
  std::map<std::string, int64_t> globals;  ///< bytes by name
};

struct Code {
  std::optional<CodeNames> names;  ///< nullopt: any name may exist
  std::map<std::string, KernelTraffic>
      traffic{};  ///< of its kernels, where a run is metered and the code is or has PTX
};

/// PTX begins with a .version directive; comments and empty lines may stand before it (PTX ISA).
bool begins_as_ptx(std::string_view text);

/// The names that a PTX module defines (PTX ISA, "Kernel and function directives" and "Variables").
CodeNames read_ptx(std::string_view text);

/// Code as cuModuleLoadData takes it: PTX that ends with 0, a cubin or a fat binary. CUDA_ERROR_INVALID_IMAGE for what is none of
/// these, CUDA_ERROR_INVALID_VALUE for an address that cannot be read.
CUresult read_code(const void* image, Code& code);

/// An image that reads as that code.
std::string write_code(const Code& code);

/// The same as read_code of a file; CUDA_ERROR_FILE_NOT_FOUND.
CUresult read_code_file(const char* path, Code& code);

}  // namespace oomdiag
