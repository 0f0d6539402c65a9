#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/device/device.h"
#include "cli/launch/programs.h"
#include "cli/launch/ranks.h"

namespace oomdiag {

/// What the command line of `fix` says; `fit --fastest` makes it from its own.
struct FixOptions {
  std::vector<std::string> program{};
  std::string folder{};
  ModelOptions model{};
  DeviceOptions device{};
  RankOptions ranks{};
  std::string target{};
  std::string budget{};
  std::string output{};
  std::string html{};
  int64_t batch = 0;
  bool fastest = false;  ///< the fastest plan is asked for
  bool json = false;
  bool never_forks = false;
};

/// Tries fixes or, with `fastest`, plans; prints what was found and returns the exit code.
int fix(FixOptions options);

}  // namespace oomdiag
