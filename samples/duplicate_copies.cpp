// The same host tensor is moved to the GPU twice, from two places of the program.

#include "samples/training.h"

namespace samples {

namespace {

torch::Tensor move_for_training(const torch::Tensor& features, const Options& options) {
  SAMPLES_SCOPE("move_for_training");
  return features.to(options.device);
}

torch::Tensor move_for_validation(const torch::Tensor& features, const Options& options) {
  SAMPLES_SCOPE("move_for_validation");
  return features.to(options.device);
}

}  // namespace

void run_duplicate_copies(const Options& options) {
  const auto features = torch::randn({4096, 2048});
  const auto training = move_for_training(features, options);
  const auto validation = options.variant == "once" ? training : move_for_validation(features, options);
  const auto means = scoped("mean", [&] { return torch::stack({training.mean(), validation.mean()}); });
  print_loss(options, means.sum());
}

}  // namespace samples
