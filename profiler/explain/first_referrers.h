#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <tuple>
#include <vector>

#include "profiler/replay/history.h"

namespace oomdiag {

/// The first referrer to tensors of one maker and size: there may be ten thousands of blocks and of referrers.
class FirstReferrers {
 public:
  explicit FirstReferrers(const std::vector<Referrer>& referrers);

  /// Null where there is none. Valid as long as this is.
  const Referrer* find(const LiveBlock& block) const;

 private:
  std::map<std::tuple<std::string_view, std::string_view, int64_t>, std::vector<Referrer>> first_;
};

}  // namespace oomdiag
