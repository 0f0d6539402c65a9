#pragma once

#include <dlfcn.h>

#include <string>

namespace oomdiag {

/// The function around `address` by the full symbol table of the file that dladdr found it in, mangled: programs export few
/// of their functions to the loader. Empty where the file was stripped. Reads the file: not for hot paths.
std::string find_local_symbol(const Dl_info& found, const void* address);

}  // namespace oomdiag
