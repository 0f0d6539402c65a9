#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/explain/causes.h"
#include "profiler/explain/common_referrers.h"
#include "profiler/explain/growth.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// Why so much is held or requested, as a programmer would say it: the second level of a cause.
struct Reason {
  std::string id;                  ///< name of the row of kReasons
  std::string text;                ///< one sentence with its evidence and its line
  int64_t bytes = 0;               ///< that it holds or requests
  std::string fix{};               ///< id of the row of kFixes that cures it
  std::vector<std::string> how{};  ///< lines to change, in place of that row's

  bool operator==(const Reason&) const = default;
};

/// What the rows of kReasons look at, all of one device.
struct ReasonFacts {
  const DeviceHistory& device;
  const std::vector<Growth>& growths;
  std::optional<CauseKind> cause{};
  int64_t batch = 0;  ///< examples of a step; 0: unknown
  CommonReferrers referrers{device.referrers};
};

/// Beside a `first` reason of size: that this step is larger than those before it.
std::optional<Reason> find_second_reason(const ReasonFacts& facts, const Reason& first);

/// The first row of kReasons that holds; nothing where no row does. Of a run that fits only growth has a reason.
std::optional<Reason> find_reason(const ReasonFacts& facts);

}  // namespace oomdiag
