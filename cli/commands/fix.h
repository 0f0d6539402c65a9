#pragma once

#include <string>
#include <vector>

#include "cli/device/device.h"
#include "cli/launch/programs.h"

namespace oomdiag {

/// What `fit --fastest` takes from its command line.
struct SpeedRequest {
  std::vector<std::string> program{};
  ModelOptions model{};
  DeviceOptions device{};
  std::string html{};
  bool json = false, never_forks = false;
};

/// Finds the fastest plan that fits on the device, prints it and returns the exit code, as `fix --budget` does.
int fix_for_speed(const SpeedRequest& request);

}  // namespace oomdiag
