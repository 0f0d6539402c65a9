#pragma once

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace oomdiag {

/// The version of the LibTorch that is loaded in this process ("2.15.0+cu132"), read from the wheel's version.py beside it,
/// so that it is known before any symbol of it is used. Empty if no torch is loaded or it is not from a wheel.
inline std::string loaded_torch_version() {
  void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return {};
  link_map* map = nullptr;
  std::string version;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) {
    std::ifstream file(std::filesystem::path(map->l_name).parent_path().parent_path() / "version.py");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("__version__")) continue;
      const auto first = line.find('\'');
      version = line.substr(first + 1, line.rfind('\'') - first - 1);
    }
  }
  dlclose(library);
  return version;
}

/// "2.15" of "2.15.0+cu132".
inline std::string minor_version(const std::string& version) {
  const auto dot = version.find('.');
  return dot == version.npos ? version : version.substr(0, version.find('.', dot + 1));
}

}  // namespace oomdiag
