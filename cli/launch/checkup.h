#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cli/device/device.h"
#include "cli/python/install.h"

namespace oomdiag {

/// One way in which the recorder sees a program, tried out.
struct HookCheck {
  std::string name;  ///< "allocator"
  bool works = false;
  std::string detail;  ///< what was seen, or why nothing was

  bool operator==(const HookCheck&) const = default;
};

struct ProcessCheck {
  uint64_t pid = 0;
  std::string name;
  int64_t bytes = 0;

  bool operator==(const ProcessCheck&) const = default;
};

/// Something that would limit a diagnosis, and what to do about it.
struct Trouble {
  std::string what;
  std::string fix;

  bool operator==(const Trouble&) const = default;
};

/// What `oomdiag doctor` found out, by running a few lines of PyTorch under the recorder.
struct Checkup {
  bool has_gpu = false;         ///< the driver shows a device
  bool virtual_device = false;  ///< the lines ran on a virtual one
  std::string gpu{};
  int64_t total_bytes = 0, free_bytes = 0;
  std::vector<std::pair<std::string, std::string>> versions{};  ///< "torch" → "2.15.0+cu132"; empty where not known
  std::vector<std::pair<std::string, std::string>> settings{};  ///< environment variables that change what is recorded
  std::vector<HookCheck> hooks{};
  std::string cupti_holder{};          ///< why calls of the driver are not seen; empty if they are
  std::vector<std::string> missing{};  ///< what the recorder knows by names that this torch or Python lacks (kNotFound)
  bool asked_nvml = false;             ///< whether `processes` is known
  std::vector<ProcessCheck> processes{};
  std::string failure{};  ///< why the lines did not run; empty if they did
  std::string fix{};      ///< for `failure`
};

/// Runs the lines with `python` on `device`. Throws nothing that has a place in the result.
Checkup check_up(const std::string& python, const DeviceChoice& device, const Install& install);

/// What would limit a diagnosis of a program that runs in these circumstances. Pure.
std::vector<Trouble> find_troubles(const Checkup& checkup);

}  // namespace oomdiag
