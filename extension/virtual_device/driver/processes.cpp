// Other processes of this machine.

#include <signal.h>

#include <cerrno>
#include <fstream>
#include <string>

#include "extension/virtual_device/driver/device.h"

// proc(5), stat: the state follows the name, which may hold anything. Without /proc, as in a chroot, a process that can be
// sent a signal is alive.
bool oomdiag_device_is_alive(int pid) noexcept {
  if (pid <= 0 || (kill(pid, 0) != 0 && errno == ESRCH)) return false;
  std::ifstream stream("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(stream, text);
  const size_t name_end = text.rfind(')');
  if (name_end == text.npos || text.size() <= name_end + 2) return true;
  return text[name_end + 2] != 'Z' && text[name_end + 2] != 'X';
}
