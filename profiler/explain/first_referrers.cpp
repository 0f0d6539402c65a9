#include "profiler/explain/first_referrers.h"

#include <algorithm>
#include <vector>

#include "profiler/replay/history.h"

namespace oomdiag {

FirstReferrers::FirstReferrers(const std::vector<Referrer>& referrers) {
  for (const Referrer& one : referrers) {
    auto& alike = first_[{one.made.source, one.made.op, one.storage_bytes}];
    if (std::ranges::find(alike, one.made, &Referrer::made) == alike.end()) alike.push_back(one);
  }
}

const Referrer* FirstReferrers::find(const LiveBlock& block) const {
  const auto alike = first_.find({block.made.source, block.made.op, block.requested_bytes});
  if (alike == first_.end()) return nullptr;
  const auto found = std::ranges::find(alike->second, block.made, &Referrer::made);
  return found == alike->second.end() ? nullptr : &*found;
}

}  // namespace oomdiag
