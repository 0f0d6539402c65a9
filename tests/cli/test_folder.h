#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "cli/process/temporary_folder.h"

namespace oomdiag {

/// A folder for one test.
class TestFolder : public TemporaryFolder {
 public:
  /// Writes a file, and the folders on the way to it.
  std::filesystem::path write(const std::string& name, const std::string& text = "") const {
    std::filesystem::create_directories((path() / name).parent_path());
    std::ofstream(path() / name) << text;
    return path() / name;
  }
};

}  // namespace oomdiag
