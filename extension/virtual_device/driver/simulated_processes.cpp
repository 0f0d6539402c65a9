#include "extension/virtual_device/driver/simulated_processes.h"

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "extension/environment.h"

namespace oomdiag {
namespace {

struct SimulatedProcess {
  unsigned pid = 0;
  std::string name;
  int64_t bytes = 0;
};

std::vector<SimulatedProcess> read_simulated_processes() {
  std::vector<SimulatedProcess> found;
  const char* text = std::getenv(variables::kOtherProcesses);
  std::istringstream list(text ? text : "");
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

}  // namespace

int64_t simulated_bytes(int device) {
  int64_t sum = 0;
  for (const SimulatedProcess& one : simulated_processes()) sum += device == 0 ? one.bytes : 0;
  return sum;
}

}  // namespace oomdiag

bool oomdiag_device_simulated_process(int device, unsigned index, unsigned* pid, int64_t* bytes, const char** name) {
  const auto& found = oomdiag::simulated_processes();
  if (device != 0 || index >= found.size()) return false;
  *pid = found[index].pid;
  *bytes = found[index].bytes;
  *name = found[index].name.c_str();
  return true;
}
