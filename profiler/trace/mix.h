#pragma once

#include <cstdint>

namespace oomdiag {

/// Fibonacci hashing (Knuth, "The Art of Computer Programming", volume 3, 6.4): keys that lie close together differ in the
/// high bits of the product.
constexpr uint64_t spread(uint64_t key) noexcept { return key * 0x9E3779B97F4A7C15u; }  // 2^64 / the golden ratio

/// A hash with one more value in it, whose high bits are brought down.
constexpr uint64_t mix(uint64_t hash, uint64_t value) noexcept {
  hash = spread(hash ^ value);
  return hash ^ hash >> 29;
}

}  // namespace oomdiag
