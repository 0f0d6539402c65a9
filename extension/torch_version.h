#pragma once

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace oomdiag {

/// The version that stands in the files of a torch in this folder: a wheel's version.py, the build-version of a LibTorch
/// archive, or its headers. Empty if there are none of them.
inline std::string torch_version_in(const std::filesystem::path& folder) {
  std::ifstream module(folder / "version.py");
  for (std::string line; std::getline(module, line);) {
    if (!line.starts_with("__version__")) continue;
    const auto first = line.find('\'');
    return line.substr(first + 1, line.rfind('\'') - first - 1);
  }
  std::ifstream archive(folder / "build-version");
  if (std::string line; std::getline(archive, line) && !line.empty()) return line;
  std::ifstream header(folder / "include/torch/headeronly/version.h");
  std::string numbers[3];
  for (std::string word; header >> word;) {
    if (word == "TORCH_VERSION_MAJOR" && numbers[0].empty()) header >> numbers[0];
    if (word == "TORCH_VERSION_MINOR" && numbers[1].empty()) header >> numbers[1];
    if (word == "TORCH_VERSION_PATCH" && numbers[2].empty()) header >> numbers[2];
  }
  return numbers[0].empty() ? std::string() : numbers[0] + "." + numbers[1] + "." + numbers[2];
}

/// Where the LibTorch that is loaded in this process lies: the folder above its lib/. Empty if none is loaded.
inline std::filesystem::path loaded_torch_folder() {
  void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return {};
  link_map* map = nullptr;
  std::filesystem::path folder;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) {
    folder = std::filesystem::path(map->l_name).parent_path().parent_path();
  }
  dlclose(library);
  return folder;
}

/// The version of the LibTorch that is loaded in this process ("2.15.0+cu132"), read from the files beside it, so that it is
/// known before any symbol of it is used. Empty if no torch is loaded or it does not say.
inline std::string loaded_torch_version() {
  const std::filesystem::path folder = loaded_torch_folder();
  return folder.empty() ? std::string() : torch_version_in(folder);
}

/// "2.15" of "2.15.0+cu132".
inline std::string minor_version(const std::string& version) {
  const auto dot = version.find('.');
  return dot == version.npos ? version : version.substr(0, version.find('.', dot + 1));
}

}  // namespace oomdiag
