#pragma once

#include <cstdint>
#include <string>

#include "profiler/replay/allocator/settings.h"
#include "profiler/shape_function/polynomial.h"
#include "profiler/shape_function/shape_function.h"

namespace oomdiag {

/// What the function says of one point.
struct ShapeEstimate {
  bool fits = false;
  int64_t peak_allocated_bytes = 0, peak_reserved_bytes = 0;  ///< as far as it went
  uint32_t step = 0;                                          ///< in which it fails; 0 = it fits
  std::string place{};                                        ///< where it fails
  int64_t requested_bytes = 0;                                ///< … by this request
  uint32_t retries = 0;                                       ///< times that cached segments had to be given back
  /// Why it may be wrong, or empty: then it is what a run would show.
  std::string doubt{};
  int64_t doubtful_bytes = 0;  ///< of the largest allocation whose size no polynomial gives
  /// What the unknown sizes may be does not change it.
  bool allocated_is_exact = true, reserved_is_exact = true;

  bool is_exact() const { return allocated_is_exact && reserved_is_exact; }
  bool operator==(const ShapeEstimate&) const = default;
};

/// Runs the allocator's algorithm on the allocations that the program would make at `point`, where PyTorch may take
/// `available_bytes`. About a millisecond.
ShapeEstimate evaluate(const ShapeFunction& function, const ShapePoint& point, int64_t available_bytes,
                       const AllocatorSettings& settings);
/// The same with the settings that the runs had.
ShapeEstimate evaluate(const ShapeFunction& function, const ShapePoint& point, int64_t available_bytes);

/// What is alive at the peak of `point`, in bytes that were requested, as a polynomial; what no polynomial gives counts as at
/// `point`.
Polynomial peak_formula(const ShapeFunction& function, const ShapePoint& point);

}  // namespace oomdiag
