#pragma once

#include <cstdint>

namespace oomdiag {

/// Threads of a block, or blocks of a grid.
struct Shape {
  unsigned x = 1, y = 1, z = 1;

  double count() const { return double{1} * x * y * z; }
};

/// The bounds of every compute capability (CUDA programming guide, technical specifications).
inline bool is_launchable(const Shape& grid, const Shape& block) {
  const bool has_all = grid.x && grid.y && grid.z && block.x && block.y && block.z;
  return has_all && grid.x <= INT32_MAX && grid.y <= 65535 && grid.z <= 65535 && block.z <= 64 && block.count() <= 1024;
}

}  // namespace oomdiag
