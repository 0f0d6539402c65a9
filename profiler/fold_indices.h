#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "profiler/whole_number.h"

namespace oomdiag {

/// "transformer.h.*.mlp" of "transformer.h.11.mlp": bare numbers are indices of layers that are alike.
inline std::string fold_indices(std::string_view path) {
  std::string folded;
  while (true) {
    const size_t dot = std::min(path.find('.'), path.size());
    const std::string_view part = path.substr(0, dot);
    folded += !part.empty() && std::ranges::all_of(part, is_digit) ? "*" : part;
    if (dot == path.size()) return folded;
    folded += '.';
    path.remove_prefix(dot + 1);
  }
}

}  // namespace oomdiag
