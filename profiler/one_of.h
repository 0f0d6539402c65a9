#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

namespace oomdiag {

/// Whether `name` is in the list.
template <size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& list) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

}  // namespace oomdiag
