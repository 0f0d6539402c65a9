#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace oomdiag {

/// All of a file; empty where it cannot be read.
inline std::string read_file(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace oomdiag
