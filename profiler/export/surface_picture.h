#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace oomdiag {

/// The peak as a function of two dimensions of a program, on a grid.
struct Surface {
  std::string x_name{}, y_name{};
  std::vector<int64_t> x{}, y{};                 ///< the values of the grid, ascending
  std::vector<int64_t> peak_bytes{};             ///< of each point, row by row: x varies fastest
  std::vector<bool> fits{}, is_exact{};          ///< likewise
  std::vector<std::optional<int64_t>> border{};  ///< of each y the largest x that fits; nullopt: none
  int64_t available_bytes = 0;                   ///< what PyTorch may take of the GPU
};

/// A table of the peaks in GiB as SVG, x to the right and y upwards, with a line between what fits and what does not; empty
/// without points.
std::string draw_surface(const Surface& surface);

}  // namespace oomdiag
