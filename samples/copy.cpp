// A tensor of 1000x1000x1000 floats: x + 1 is a second one, x.add_(1) is not.

#include "samples/training.h"

namespace samples {

void run_copy(const Options& options) {
  const torch::NoGradGuard no_grad;
  const auto x = scoped("x", [&] { return torch::zeros({1000, 1000, 1000}, options.floats()); });
  const Mark mark("add");
  const auto y = scoped("y", [&] { return options.variant == "in_place" ? x.add_(1) : x + 1; });
  print_fact("same_storage", x.data_ptr() == y.data_ptr());
}

}  // namespace samples
