// A generator whose images are looked at and never run backward: gradients that nobody wants.

#include "samples/training.h"

namespace samples {

namespace {

struct Generator : torch::nn::Module {
  torch::nn::Linear fc1{20, 128};
  torch::nn::Linear fc2{128, 100};

  Generator() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = scoped("fc1", [&] { return fc1(x); });
    x = scoped("relu", [&] { return torch::relu(x); });
    x = scoped("fc2", [&] { return fc2(x); });
    return scoped("tanh", [&] { return torch::tanh(x); });
  }
};

}  // namespace

void run_generator(const Options& options) {
  Generator model;
  move_to(model, options);
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(2e-4));  // never gets a gradient
  const torch::AutoGradMode gradients(options.variant != "no_grad");

  for (int64_t i = 0; i < options.steps; ++i) {
    const auto noise = scoped("noise", [&] { return torch::randn({options.batch, 20}, options.floats()); });
    Mark mark("generate");
    auto images = model.forward(noise);
    if (options.variant == "detach") images = images.detach();
    const auto loss = scoped("loss", [&] { return images.square().mean(); });
    mark.end();
    step(optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
