#include "extension/virtual_device/driver/host_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>

#include "profiler/host.h"

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

}  // namespace

int64_t host_memory_bytes() {
  static const int64_t bytes = total_memory().value_or(INT64_MAX);
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
