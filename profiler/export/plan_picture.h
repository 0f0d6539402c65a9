#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace oomdiag {

/// A plan by its peak and the time of its step.
struct PlanPoint {
  enum class State { computed, fits, does_not_fit };
  std::string label{};
  int64_t peak_bytes = 0, step_ns = 0;
  State state = State::computed;
};

/// Peak against time as SVG, with a line at what PyTorch may take of the GPU; empty for fewer than two points.
std::string draw_plans(const std::vector<PlanPoint>& points, int64_t available_bytes);

}  // namespace oomdiag
