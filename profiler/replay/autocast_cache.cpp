#include "profiler/replay/autocast_cache.h"

#include <algorithm>
#include <array>

namespace oomdiag {
namespace {

// at::to copies into a tensor that one of these makes; results of other ops are made by the ops themselves.
bool makes_copy(std::string_view inner) {
  constexpr std::array<std::string_view, 5> kMakers = {"aten::empty_strided", "aten::empty_like", "aten::empty",
                                                       "aten::_to_copy", "aten::to"};
  return std::find(kMakers.begin(), kMakers.end(), inner) != kMakers.end();
}

bool made_under_autocast(const LiveBlock& block) {
  return !block.pending_free && !block.made.autocast.empty() && block.made.node.empty();
}

bool is_castable(const LiveBlock& block) {
  const bool known = block.shape.empty() || block.shape.ends_with(" float32");
  return !block.pending_free && block.category == Category::parameter && known;
}

/// "64, 32" of "[64, 32] float32".
std::string_view sizes_of(std::string_view shape) {
  const size_t end = shape.find(']');
  return end == shape.npos || end == 0 ? std::string_view() : shape.substr(1, end - 1);
}

// A matrix is saved as it was used, perhaps transposed.
bool have_same_shape(const LiveBlock& cast, const LiveBlock& parameter) {
  const std::string_view a = sizes_of(cast.shape), b = sizes_of(parameter.shape);
  if (a.empty() || a == b) return !a.empty();
  const size_t comma = a.find(", ");
  if (comma == a.npos || a.find(", ", comma + 1) != a.npos) return false;
  return std::string(a.substr(comma + 2)) + ", " + std::string(a.substr(0, comma)) == b;
}

bool is_of_module(const LiveBlock& cast, const LiveBlock& parameter) {
  const size_t dot = parameter.name.rfind('.');
  return dot != parameter.name.npos && parameter.name.substr(0, dot) == cast.made.module;
}

using Candidates = std::vector<const LiveBlock*>;

/// Takes the casts that are copies of `parameters` out of both lists; gives their bytes.
int64_t take_pairs(Candidates& casts, Candidates& parameters, bool (*fits)(const LiveBlock&, const LiveBlock&)) {
  int64_t bytes = 0;
  std::erase_if(casts, [&](const LiveBlock* cast) {
    const auto found = std::find_if(parameters.begin(), parameters.end(), [&](const LiveBlock* parameter) {
      return parameter->requested_bytes == 2 * cast->requested_bytes && fits(*cast, *parameter);
    });
    if (found == parameters.end()) return false;
    bytes += cast->bytes;
    parameters.erase(found);
    return true;
  });
  return bytes;
}

}  // namespace

AutocastUse find_autocast(const Moment& moment) {
  AutocastUse use{.dtype = moment.where.autocast,
                  .region_open = !moment.where.autocast.empty() && moment.where.node.empty()};
  Candidates casts, parameters;
  for (const LiveBlock& block : moment.blocks) {
    if (is_castable(block)) parameters.push_back(&block);
    if (!made_under_autocast(block)) continue;
    use.dtype = block.made.autocast;
    use.made_bytes += block.bytes;
    if (makes_copy(block.made.inner)) casts.push_back(&block);
  }
  use.cache_bytes = take_pairs(casts, parameters, is_of_module);
  use.cache_bytes += take_pairs(casts, parameters, have_same_shape);  // a tied weight may be cast in another module
  return use;
}

}  // namespace oomdiag
