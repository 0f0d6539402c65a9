#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace oomdiag {

/// Where pip installs packages; Debian has a folder of the same length for those of its own.
inline constexpr std::string_view kPackagesFolder = "/site-packages/", kPackagesOfDebian = "/dist-packages/";
static_assert(kPackagesFolder.size() == kPackagesOfDebian.size());

/// Where the folder of the installed packages stands in the path of a file; npos of what is not installed.
inline size_t find_packages_folder(std::string_view file) {
  return std::min(file.rfind(kPackagesFolder), file.rfind(kPackagesOfDebian));
}

/// Where the path inside of it begins; npos of what is not installed.
inline size_t find_package(std::string_view file) {
  const size_t folder = find_packages_folder(file);
  return folder == file.npos ? file.npos : folder + kPackagesFolder.size();
}

/// Whether it names a file there: of a call in a stack the path may begin with that folder.
inline bool is_in_package(std::string_view call) {
  return call.find(kPackagesFolder.substr(1)) != call.npos || call.find(kPackagesOfDebian.substr(1)) != call.npos;
}

}  // namespace oomdiag
