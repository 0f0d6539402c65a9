#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace oomdiag {

/// Where the parts of this build lie. They need not exist.
struct Install {
  std::filesystem::path libraries;       ///< liboomdiag.so, liboomdiag_preload.so
  std::filesystem::path virtual_device;  ///< the libraries that stand in for CUDA's
  std::filesystem::path samples;         ///< the program with the reference models
  std::filesystem::path models;          ///< the list of those models, made when they were built
  std::filesystem::path cards;           ///< the catalogue, one JSON file per card
  std::filesystem::path python;          ///< the private python
  std::string torch_version;             ///< built for, "2.15.0+cu132"
};

/// The build that this executable belongs to.
Install find_install();

/// "2.15" of "2.15.0+cu132".
std::string_view minor_of(std::string_view version);

}  // namespace oomdiag
