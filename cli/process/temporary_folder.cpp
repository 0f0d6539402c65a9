#include "cli/process/temporary_folder.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdlib>

#include "profiler/error.h"

namespace oomdiag {

TemporaryFolder::TemporaryFolder(std::filesystem::path parent) {
  std::error_code error;
  if (parent.empty()) parent = std::filesystem::temp_directory_path(error);
  std::string name = (parent / "oomdiag-XXXXXX").string();
  if (!error && mkdtemp(name.data()) == nullptr) error.assign(errno, std::generic_category());
  if (error) {
    throw Error(ErrorKind::environment,
                fmt::format("cannot make a folder in '{}': {}", parent.string(), error.message()),
                "set TMPDIR to one that can be written");
  }
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace oomdiag
