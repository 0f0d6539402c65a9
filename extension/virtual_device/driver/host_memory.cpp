#include "extension/virtual_device/driver/host_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <string>

namespace oomdiag {
namespace {

using Transfer = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);

/// Both ends of a range, and what they have.
struct Ends {
  std::array<char, 2> values{};
  char* begin;
  char* last;

  Ends(const void* from, size_t bytes)
      : begin(const_cast<char*>(static_cast<const char*>(from))), last(begin + bytes - 1) {}

  bool transfer(Transfer call) noexcept {
    const iovec here{values.data(), values.size()};
    const std::array<iovec, 2> there{iovec{begin, 1}, iovec{last, 1}};
    const ssize_t count = call(getpid(), &here, 1, there.data(), there.size(), 0);
    return count == 2 || (count < 0 && errno != EFAULT);
  }
};

constexpr int64_t kNoBound = INT64_MAX;

/// The number that a file begins with; no bound where there is no such file, and for "max".
int64_t read_bound(const std::string& path) {
  std::ifstream file(path);
  int64_t bytes = 0;
  return file >> bytes ? bytes : kNoBound;
}

int64_t total_memory() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  int64_t kibibytes = 0;
  while (file >> word) {
    if (word == "MemTotal:" && file >> kibibytes) return kibibytes << 10;
  }
  return kNoBound;
}

/// The least bound of a control group and those above it.
int64_t bound_of_group(const std::string& mount, const char* file, std::string group) {
  int64_t least = read_bound(mount + "/" + file);
  while (group.size() > 1) {
    least = std::min(least, read_bound(mount + group + "/" + file));
    group.resize(group.rfind('/'));
  }
  return least;
}

/// cgroups(7): a line is "number:controllers:group", with no controllers in version 2.
int64_t bound_of_groups() {
  std::ifstream file("/proc/self/cgroup");
  int64_t least = kNoBound;
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t last = line.find(':', first + 1);
    if (last == line.npos) continue;
    const std::string controllers = line.substr(first + 1, last - first - 1);
    const std::string group = line.substr(last + 1);
    if (controllers.empty()) least = std::min(least, bound_of_group("/sys/fs/cgroup", "memory.max", group));
    if (("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    least = std::min(least, bound_of_group("/sys/fs/cgroup/memory", "memory.limit_in_bytes", group));
  }
  return least;
}

}  // namespace

int64_t host_memory_bytes() {
  static const int64_t bytes = std::min(total_memory(), bound_of_groups());
  return bytes;
}

bool read_safely(void* to, const void* from, size_t bytes) noexcept {
  const iovec here{to, bytes};
  const iovec there{const_cast<void*>(from), bytes};
  return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == static_cast<ssize_t>(bytes);
}

bool can_read(const void* begin, size_t bytes) noexcept {
  return bytes == 0 || Ends(begin, bytes).transfer(process_vm_readv);
}

bool can_write(void* begin, size_t bytes) noexcept {
  if (bytes == 0) return true;
  Ends ends(begin, bytes);
  return ends.transfer(process_vm_readv) && ends.transfer(process_vm_writev);
}

}  // namespace oomdiag
