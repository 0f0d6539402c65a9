#include "cli/install.h"

// OOMDIAG_SOURCE, OOMDIAG_PYTHON and OOMDIAG_TORCH_VERSION come from cli/CMakeLists.txt.

namespace oomdiag {

Install find_install() {
  std::error_code ignored;
  const std::filesystem::path build =
      std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path().parent_path();
  return {
      .libraries = build / "lib",
      .virtual_device = build / "lib" / "virtual_device",
      .samples = build / "bin" / "oomdiag_samples",
      .models = build / "share" / "models.json",
      .cards = std::filesystem::path(OOMDIAG_SOURCE) / "extension" / "virtual_device" / "cards",
      .python = OOMDIAG_PYTHON,
      .torch_version = OOMDIAG_TORCH_VERSION,
  };
}

std::string_view minor_of(std::string_view version) {
  const std::size_t first = version.find('.');
  return version.substr(0,
                        first == std::string_view::npos ? first : version.find_first_not_of("0123456789", first + 1));
}

}  // namespace oomdiag
