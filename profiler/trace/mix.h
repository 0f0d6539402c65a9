#pragma once

#include <cstdint>

namespace oomdiag {

/// A hash with one more value in it (Fibonacci hashing, whose high bits are brought down).
constexpr uint64_t mix(uint64_t hash, uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 29;
}

}  // namespace oomdiag
