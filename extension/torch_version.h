#pragma once

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <string>

// No streams and no std::filesystem: the shim has its C++ library in it, and a child process would wait for what they set up.

namespace oomdiag {

/// The lines of a text file, one after the other; an absent file has none.
class TextLines {
 public:
  explicit TextLines(const std::string& file) : file_(std::fopen(file.c_str(), "re")) {}
  ~TextLines() {
    if (file_ != nullptr) std::fclose(file_);
  }
  TextLines(const TextLines&) = delete;
  TextLines& operator=(const TextLines&) = delete;

  /// False at the end. `line` comes without its newline.
  bool next(std::string& line) {
    line.clear();
    int letter = file_ == nullptr ? EOF : std::fgetc(file_);
    if (letter == EOF) return false;
    for (; letter != EOF && letter != '\n'; letter = std::fgetc(file_)) line += static_cast<char>(letter);
    return true;
  }

 private:
  std::FILE* file_;
};

/// What stands behind "#define NAME " at the beginning of a line of a header, up to the next space; empty if nothing does.
inline std::string defined_in(const std::string& header, const std::string& name) {
  const std::string start = "#define " + name + " ";
  TextLines lines(header);
  for (std::string line; lines.next(line);) {
    if (line.starts_with(start))
      return line.substr(start.size(), line.find_first_of(" \t\r", start.size()) - start.size());
  }
  return {};
}

/// The version that stands in the files of a torch in this folder: a wheel's version.py, the build-version of a LibTorch
/// archive, or its headers. Empty if there are none of them.
inline std::string torch_version_in(const std::string& folder) {
  TextLines module(folder + "/version.py");
  for (std::string line; module.next(line);) {
    if (!line.starts_with("__version__")) continue;
    const auto first = line.find('\'');
    return line.substr(first + 1, line.rfind('\'') - first - 1);
  }
  TextLines archive(folder + "/build-version");
  if (std::string line; archive.next(line) && !line.empty()) return line;
  const std::string header = folder + "/include/torch/headeronly/version.h";
  const std::string major = defined_in(header, "TORCH_VERSION_MAJOR");
  if (major.empty()) return {};
  return major + "." + defined_in(header, "TORCH_VERSION_MINOR") + "." + defined_in(header, "TORCH_VERSION_PATCH");
}

/// Where the LibTorch that is loaded in this process lies: the folder above its lib/. Empty if none is loaded.
inline std::string loaded_torch_folder() {
  void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return {};
  link_map* map = nullptr;
  std::string folder;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) folder = map->l_name;
  dlclose(library);
  for (int up = 0; up < 2; ++up) folder.erase(folder.find_last_of('/') == folder.npos ? 0 : folder.find_last_of('/'));
  return folder;
}

/// The version of the LibTorch that is loaded in this process ("2.15.0+cu132"), read from the files beside it, so that it is
/// known before any symbol of it is used. Empty if no torch is loaded or it does not say.
inline std::string loaded_torch_version() {
  const std::string folder = loaded_torch_folder();
  return folder.empty() ? std::string() : torch_version_in(folder);
}

/// "2.15" of "2.15.0+cu132".
inline std::string minor_version(const std::string& version) {
  const auto dot = version.find('.');
  return dot == version.npos ? version : version.substr(0, version.find('.', dot + 1));
}

}  // namespace oomdiag
