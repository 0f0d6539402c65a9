#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/reason.h"
#include "profiler/replay/history.h"

namespace oomdiag {

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
