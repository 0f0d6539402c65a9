#include "cli/reports/alive.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <fstream>
#include <sstream>
#include <string>

namespace oomdiag {

// A line of /proc/<pid>/maps: "7f12…-7f13… rw-s 00000000 08:01 131074   /home/me/oomdiag-4711/trace". The device is not
// compared: filesystems made of several give another one here.
bool has_mapped(pid_t pid, const std::filesystem::path& file) {
  struct stat info {};
  if (pid <= 0 || stat(file.c_str(), &info) != 0) return false;
  std::ifstream maps(fmt::format("/proc/{}/maps", pid));
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string range, rights, offset, device;
    ino_t inode = 0;
    words >> range >> rights >> offset >> device >> inode;
    if (inode == info.st_ino && line.ends_with("/" + file.filename().string())) return true;
  }
  return false;
}

}  // namespace oomdiag
