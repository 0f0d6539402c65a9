#include "profiler/explain/variable_counts.h"

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
}

const VariableCounts::Count* VariableCounts::find_most() const {
  const auto most = std::ranges::max_element(counts_, {}, [](const auto& entry) {
    const Count& one = entry.second;
    return std::pair(one.count, -static_cast<int64_t>(one.place));
  });
  return most == counts_.end() ? nullptr : &most->second;
}

std::string_view VariableCounts::most() const {
  const Count* const most = find_most();
  return most == nullptr ? std::string_view() : most->variable;
}

int64_t VariableCounts::count_of_most() const {
  const Count* const most = find_most();
  return most == nullptr ? 0 : most->count;
}

bool VariableCounts::has(std::string_view variable) const { return counts_.contains(fold_subscripts(variable)); }

}  // namespace oomdiag
