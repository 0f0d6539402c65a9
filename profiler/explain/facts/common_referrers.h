#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "profiler/explain/facts/variable_counts.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// The variable that most tensors of one maker and size have: there may be ten thousands of blocks and of referrers. The variable of a
/// loop refers to one of its results, the list to which it appends them to all others.
class CommonReferrers {
 public:
  explicit CommonReferrers(const std::vector<Referrer>& referrers);
  CommonReferrers(const CommonReferrers&) = delete;  // what it returns refers to it
  CommonReferrers& operator=(const CommonReferrers&) = delete;

  /// Null where there is none. Valid as long as this is.
  const Referrer* find(const LiveBlock& block) const;

 private:
  struct OfMaker {
    VariableCounts variables{};
    Referrer referrer{};  ///< the first one; in the end by the most common variable
  };

  std::map<std::tuple<std::string_view, std::string_view, int64_t>, std::vector<OfMaker>> makers_;
};

/// "self.ssim.preds" of "self._modules["ssim"].preds", as a program has it; of any text that holds such names.
std::string as_written(std::string_view text);

}  // namespace oomdiag
