#include "profiler/replay/history.h"

namespace oomdiag {

std::string_view name_of(Phase phase) {
  constexpr std::array<std::string_view, kPhaseCount> kNames = {"setup", "forward", "backward", "optimizer", "other"};
  return kNames[static_cast<size_t>(phase)];
}

std::string_view name_of(Category category) {
  constexpr std::array<std::string_view, kCategoryCount> kNames = {
      "parameter",           "buffer",    "gradient",  "optimizer_state", "activation", "input", "output",
      "activation_gradient", "temporary", "workspace", "unknown"};
  return kNames[static_cast<size_t>(category)];
}

std::string_view name_of(Confidence confidence) {
  constexpr std::array<std::string_view, 4> kNames = {"none", "low", "medium", "high"};
  return kNames[static_cast<size_t>(confidence)];
}

}  // namespace oomdiag
