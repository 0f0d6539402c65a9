#include "profiler/replay/evidence/autocast_cache.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "profiler/one_of.h"
#include "profiler/replay/history.h"

namespace oomdiag {
namespace {

bool made_under_autocast(const LiveBlock& block) {
  return !block.pending_free && !block.made.autocast.empty() && block.made.node.empty();
}

bool is_castable(const LiveBlock& block) {
  const bool known = block.shape.empty() || block.shape.ends_with(" float32");
  return !block.pending_free && block.category == Category::parameter && known;
}

/// "64, 32" of "[64, 32] float32".
std::string_view text_of_sizes(std::string_view shape) {
  const size_t end = shape.find(']');
  return end == shape.npos || end == 0 ? std::string_view() : shape.substr(1, end - 1);
}

// A matrix is saved as it was used, perhaps transposed: "32, 64" of "64, 32", nothing of other tensors.
std::string transposed(std::string_view sizes) {
  const size_t comma = sizes.find(", ");
  if (comma == sizes.npos || sizes.find(", ", comma + 1) != sizes.npos) return {};
  return std::string(sizes.substr(comma + 2)) + ", " + std::string(sizes.substr(0, comma));
}

std::string_view module_of_parameter(std::string_view parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == parameter.npos ? std::string_view() : parameter.substr(0, dot);
}

using Candidates = std::vector<const LiveBlock*>;

/// What a cast and its parameter have in common: the bytes of the parameter, and its module or its sizes.
using Trait = std::pair<int64_t, std::string>;

/// Takes the casts that are copies of `parameters` out of both lists; gives their bytes. Each cast takes the first
/// parameter that has the first of its traits which any has. Empty words are no trait.
template <class TraitOfParameter, class TraitsOfCast>
int64_t take_pairs(Candidates& casts, Candidates& parameters, const TraitOfParameter& trait_of,
                   const TraitsOfCast& traits_of) {
  std::map<Trait, std::deque<const LiveBlock*>> by_trait;
  for (const LiveBlock* parameter : parameters) {
    by_trait[{parameter->requested_bytes, std::string(trait_of(*parameter))}].push_back(parameter);
  }
  std::set<const LiveBlock*> taken;
  int64_t bytes = 0;
  std::erase_if(casts, [&](const LiveBlock* cast) {
    for (const std::string& words : traits_of(*cast)) {
      const auto found = words.empty() ? by_trait.end() : by_trait.find({2 * cast->requested_bytes, words});
      if (found == by_trait.end() || found->second.empty()) continue;
      taken.insert(found->second.front());
      found->second.pop_front();
      bytes += cast->bytes;
      return true;
    }
    return false;
  });
  std::erase_if(parameters, [&](const LiveBlock* parameter) { return taken.contains(parameter); });
  return bytes;
}

/// Of the casts that are no parameter's first one, those of the sizes of a parameter of their module.
void add_repeated(const MemoryState& state, const Candidates& casts, AutocastUse& use) {
  if (casts.empty()) return;
  std::set<std::pair<std::string_view, std::string>> weights;  // modules and sizes
  for (const LiveBlock& block : state.blocks) {
    if (!is_castable(block)) continue;
    const std::string_view module = module_of_parameter(block.name), sizes = text_of_sizes(block.shape);
    weights.emplace(module, sizes);
    weights.emplace(module, transposed(sizes));
  }
  for (const LiveBlock* cast : casts) {
    const std::string_view sizes = text_of_sizes(cast->shape);
    if (sizes.empty() || !weights.contains({cast->made.module, std::string(sizes)})) continue;
    use.repeated_bytes += cast->bytes;
    ++use.repeated_count;
  }
}

}  // namespace

// at::to copies into a tensor that one of these makes; results of other ops are made by the ops themselves.
bool makes_copy(std::string_view inner) {
  return is_one_of(inner, {"aten::empty_strided", "aten::empty_like", "aten::empty", "aten::_to_copy", "aten::to"});
}

AutocastUse find_autocast(const MemoryState& state) {
  AutocastUse use{.dtype = std::string(state.where.autocast),
                  .region_open = !state.where.autocast.empty() && state.where.node.empty()};
  Candidates casts, parameters;
  for (const LiveBlock& block : state.blocks) {
    if (is_castable(block)) parameters.push_back(&block);
    if (!made_under_autocast(block)) continue;
    use.dtype = block.made.autocast;
    use.made_bytes += block.bytes;
    if (makes_copy(block.made.inner)) casts.push_back(&block);
  }
  use.cache_bytes = take_pairs(
      casts, parameters, [](const LiveBlock& parameter) { return module_of_parameter(parameter.name); },
      [](const LiveBlock& cast) { return std::array{std::string(cast.made.module)}; });
  // A tied weight may be cast in another module.
  use.cache_bytes += take_pairs(
      casts, parameters, [](const LiveBlock& parameter) { return text_of_sizes(parameter.shape); },
      [](const LiveBlock& cast) {
        const std::string_view sizes = text_of_sizes(cast.shape);
        return std::array{std::string(sizes), transposed(sizes)};
      });
  add_repeated(state, casts, use);
  return use;
}

}  // namespace oomdiag
