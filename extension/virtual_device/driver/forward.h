#pragma once

#include <cuda.h>

namespace oomdiag {

/// Calls another function of the driver: what the functions of entry_points.txt do that do anything.
template <typename... Parameters, typename... Values>
CUresult same(CUresult (*function)(Parameters...), Values... values) {
  return function((Parameters)values...);
}

}  // namespace oomdiag
