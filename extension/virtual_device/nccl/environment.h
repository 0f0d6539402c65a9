#pragma once

#include <cstdint>
#include <cstdlib>

namespace oomdiag {

/// A variable of the environment that is a number, `otherwise` where it is not there or none.
inline uint64_t number_of(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (!text || text[0] < '0' || text[0] > '9') return otherwise;
  return std::strtoull(text, nullptr, 10);
}

}  // namespace oomdiag
