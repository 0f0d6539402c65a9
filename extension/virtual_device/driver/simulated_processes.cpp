#include "extension/virtual_device/driver/simulated_processes.h"

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "extension/environment.h"
#include "extension/virtual_device/device_files/gpu.h"
#include "extension/virtual_device/driver/devices.h"

namespace oomdiag {
namespace {

struct SimulatedProcess {
  unsigned pid = 0;
  std::string name;
  int64_t bytes = 0;
};

std::vector<SimulatedProcess> read_simulated_processes() {
  std::vector<SimulatedProcess> found;
  std::istringstream list(variables::text(variables::kOtherProcesses));
  for (std::string entry; std::getline(list, entry, ',');) {
    const size_t first = entry.find(':');
    const size_t last = entry.rfind(':');
    if (first == entry.npos || last == first) continue;
    found.push_back({.pid = static_cast<unsigned>(std::strtoul(entry.c_str(), nullptr, 10)),
                     .name = entry.substr(first + 1, last - first - 1),
                     .bytes = std::strtoll(entry.c_str() + last + 1, nullptr, 10)});
  }
  return found;
}

const std::vector<SimulatedProcess>& simulated_processes() {
  static const auto& found = *new std::vector<SimulatedProcess>(read_simulated_processes());
  return found;
}

constexpr unsigned kWindowsPid = (1 << 22) + 4;  // of no process of this machine: Linux' are below 2^22

int64_t bytes_of_windows_on(int index) {
  const Device* const device = machine_driver().is_wddm ? find_installed(index) : nullptr;
  return device == nullptr ? 0 : bytes_of_windows(device->gpu.total_bytes);
}

}  // namespace

int64_t simulated_bytes(int device) {
  int64_t sum = bytes_of_windows_on(device);
  for (const SimulatedProcess& one : simulated_processes()) sum += device == 0 ? one.bytes : 0;
  return sum;
}

}  // namespace oomdiag

bool oomdiag_device_simulated_process(int device, unsigned index, unsigned* pid, int64_t* bytes, const char** name) {
  const auto& found = oomdiag::simulated_processes();
  const size_t count = device == 0 ? found.size() : 0;
  if (index >= count) {  // Windows is the last one, where it is there
    *pid = oomdiag::kWindowsPid;
    *bytes = oomdiag::bytes_of_windows_on(device);
    *name = "Windows";
    return index == count && *bytes > 0;
  }
  *pid = found[index].pid;
  *bytes = found[index].bytes;
  *name = found[index].name.c_str();
  return true;
}
