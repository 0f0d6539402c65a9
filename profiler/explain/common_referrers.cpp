#include "profiler/explain/common_referrers.h"

#include <algorithm>
#include <vector>

#include "profiler/replay/history.h"

namespace oomdiag {

CommonReferrers::CommonReferrers(const std::vector<Referrer>& referrers) {
  const auto made = [](const OfMaker& maker) { return maker.referrer.made; };
  for (const Referrer& one : referrers) {
    auto& alike = makers_[{one.made.source, one.made.op, one.storage_bytes}];
    auto maker = std::ranges::find(alike, one.made, made);
    if (maker == alike.end()) maker = alike.insert(alike.end(), {.referrer = one});
    maker->variables.add(one.variable, 1);
  }
  for (auto& [key, alike] : makers_) {
    for (OfMaker& maker : alike) maker.referrer.variable = maker.variables.most();
  }
}

const Referrer* CommonReferrers::find(const LiveBlock& block) const {
  const auto alike = makers_.find({block.made.source, block.made.op, block.requested_bytes});
  if (alike == makers_.end()) return nullptr;
  const auto found =
      std::ranges::find(alike->second, block.made, [](const OfMaker& maker) { return maker.referrer.made; });
  return found == alike->second.end() ? nullptr : &found->referrer;
}

}  // namespace oomdiag
