#include "profiler/explain/facts/variable_counts.h"

#include <algorithm>
#include <utility>

#include "profiler/fold_indices.h"

namespace oomdiag {

void VariableCounts::add(std::string_view variable, int64_t count) {
  const size_t place = counts_.size();
  const auto [entry, is_new] =
      counts_.try_emplace(fold_subscripts(variable), Count{.variable = variable, .place = place});
  Count& known = entry->second;
  if (known.variable != variable) known.variable = entry->first;
  known.count += count;
  std::string by_any_key = fold_keys(entry->first);
  if (by_any_key == entry->first) return;
  const auto [keys, is_first] = keys_.try_emplace(std::move(by_any_key), Keys{});
  keys->second.count += count;
  keys->second.keys += is_new ? 1 : 0;
}

const VariableCounts::Count* VariableCounts::find_most() const {
  const auto most = std::ranges::max_element(counts_, {}, [](const auto& entry) {
    const Count& one = entry.second;
    return std::pair(one.count, -static_cast<int64_t>(one.place));
  });
  return most == counts_.end() ? nullptr : &most->second;
}

VariableCounts::Most VariableCounts::find() const {
  constexpr int64_t kManyKeys = 8;  // a few are names of fields
  const Count* const most = find_most();
  Most found = most == nullptr ? Most{} : Most{most->variable, most->count};
  for (const auto& [variable, keys] : keys_) {
    if (keys.keys >= kManyKeys && keys.count > found.count) found = {variable, keys.count};
  }
  return found;
}

std::string_view VariableCounts::most() const { return find().variable; }

int64_t VariableCounts::count_of_most() const { return find().count; }

bool VariableCounts::has(std::string_view variable) const { return counts_.contains(fold_subscripts(variable)); }

}  // namespace oomdiag
