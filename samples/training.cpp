#include "samples/training.h"

namespace samples {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options, std::vector<torch::Tensor> parameters) {
  using namespace torch::optim;
  if (options.optimizer == "adam") return std::make_unique<Adam>(parameters, AdamOptions(1e-3));
  if (options.optimizer == "adamw") return std::make_unique<AdamW>(parameters, AdamWOptions(1e-3));
  if (options.optimizer == "momentum") return std::make_unique<SGD>(parameters, SGDOptions(0.01).momentum(0.9));
  return std::make_unique<SGD>(parameters, SGDOptions(0.01));
}

void step(torch::optim::Optimizer& optimizer, const Options& options) {
  const std::string name = options.optimizer == "adam" ? "Adam" : options.optimizer == "adamw" ? "AdamW" : "SGD";
  SAMPLES_SCOPE("Optimizer.step#" + name + ".step");
  optimizer.step();
}

}  // namespace samples
