#include "profiler/replay/history.h"

namespace oomdiag {

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::setup:
      return "setup";
    case Phase::forward:
      return "forward";
    case Phase::backward:
      return "backward";
    case Phase::optimizer:
      return "optimizer";
    case Phase::other:
      return "other";
  }
  return "other";
}

std::string_view name_of(Category category) {
  switch (category) {
    case Category::parameter:
      return "parameter";
    case Category::buffer:
      return "buffer";
    case Category::gradient:
      return "gradient";
    case Category::optimizer_state:
      return "optimizer_state";
    case Category::activation:
      return "activation";
    case Category::input:
      return "input";
    case Category::output:
      return "output";
    case Category::activation_gradient:
      return "activation_gradient";
    case Category::temporary:
      return "temporary";
    case Category::workspace:
      return "workspace";
    case Category::unknown:
      return "unknown";
  }
  return "unknown";
}

std::string_view name_of(Confidence confidence) {
  switch (confidence) {
    case Confidence::none:
      return "none";
    case Confidence::low:
      return "low";
    case Confidence::medium:
      return "medium";
    case Confidence::high:
      return "high";
  }
  return "none";
}

}  // namespace oomdiag
