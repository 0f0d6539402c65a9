#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace oomdiag {

/// Bytes of an element of a PTX type, as of ".f32"; 0 for what is no type.
constexpr int64_t bytes_of_ptx_type(std::string_view type) {
  struct Type {
    std::string_view name;
    int64_t bytes;
  };
  constexpr Type kTypes[] = {{".b8", 1},  {".u8", 1},   {".s8", 1},  {".b16", 2}, {".u16", 2},   {".s16", 2},
                             {".f16", 2}, {".bf16", 2}, {".b32", 4}, {".u32", 4}, {".s32", 4},   {".f32", 4},
                             {".b64", 8}, {".u64", 8},  {".s64", 8}, {".f64", 8}, {".b128", 16}, {".f16x2", 4}};
  const auto* const found = std::ranges::find(kTypes, type, &Type::name);
  return found == std::end(kTypes) ? 0 : found->bytes;
}

}  // namespace oomdiag
