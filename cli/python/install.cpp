#include "cli/python/install.h"

#include "cli/process/environment.h"
#include "cli/process/files.h"
#include "extension/environment.h"

// OOMDIAG_SOURCE, OOMDIAG_PYTHON and OOMDIAG_TORCH_VERSION come from cli/CMakeLists.txt.

namespace oomdiag {
namespace {

namespace fs = std::filesystem;

Install of_build(const fs::path& build) {
  const fs::path source = OOMDIAG_SOURCE;
  return {
      .libraries = build / "lib",
      .virtual_device = build / "lib" / "virtual_device",
      .samples = build / "bin" / "oomdiag_samples",
      .models = build / "share" / "models.json",
      .gpus = source / "extension" / "virtual_device" / "device_files",
      .sources = source,
      .units = build / "share" / "recorder_units.txt",
      .python = OOMDIAG_PYTHON,
      .recorder = build / "lib" / "liboomdiag.so",
      .contents = build / "lib" / "virtual_device" / "liboomdiag_forget.so",
      .torch_version = OOMDIAG_TORCH_VERSION,
  };
}

/// As scripts/cmake/install.cmake puts it. `oomdiag` of the Python package says in OOMDIAG_PYTHON whose it is.
Install of_prefix(const fs::path& prefix) {
  const std::string python = environment(variables::kPython);
  const fs::path libraries = prefix / "lib" / "oomdiag";
  const fs::path share = prefix / "share" / "oomdiag";
  return {
      .libraries = libraries,
      .virtual_device = libraries / "virtual_device",
      .samples = prefix / "bin" / "oomdiag_samples",
      .models = share / "models.json",
      .gpus = share / "device_files",
      .sources = share / "sources",
      .units = share / "recorder_units.txt",
      .python = python.empty() ? "python3" : python,
  };
}

}  // namespace

Install find_install() {
  std::error_code ignored;
  const fs::path prefix = fs::read_symlink("/proc/self/exe", ignored).parent_path().parent_path();
  return is_there(prefix / "share" / "oomdiag") ? of_prefix(prefix) : of_build(prefix);
}

std::string_view minor_of(std::string_view version) {
  const std::size_t first = version.find('.');
  return version.substr(0,
                        first == std::string_view::npos ? first : version.find_first_not_of("0123456789", first + 1));
}

}  // namespace oomdiag
