#include "profiler/explain/facts/common_referrers.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
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

std::string as_written(std::string_view text) {
  constexpr std::string_view kModules = "._modules[";
  std::string written;
  for (size_t at = text.find(kModules); at != text.npos; at = text.find(kModules)) {
    written += text.substr(0, at);
    text.remove_prefix(at + kModules.size());
    const size_t end = std::min(text.find(']'), text.size());
    const std::string_view key = text.substr(0, end);
    const bool is_name = key.size() > 2 && key.starts_with('"');
    written += is_name ? fmt::format(".{}", key.substr(1, key.size() - 2)) : fmt::format("[{}]", key);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return written + std::string(text);
}

}  // namespace oomdiag
