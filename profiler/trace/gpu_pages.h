#pragma once

#include <cstdint>

namespace oomdiag {

/// What an allocation takes of a GPU that gives pages of `page_bytes`: whole ones, but what takes half a page at most shares
/// one with others.
constexpr int64_t charged_bytes(int64_t bytes, int64_t page_bytes) {
  return bytes <= page_bytes / 2 ? bytes : (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

}  // namespace oomdiag
