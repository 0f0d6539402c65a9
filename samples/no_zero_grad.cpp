// Training that forgets zero_grad(). The gradients are wrong; they are not larger.

#include "samples/training.h"

namespace samples {

void train_no_zero_grad(const Options& options) {
  torch::nn::Linear model(100, 10);
  move_to(*model, options);
  const auto optimizer = make_optimizer(options, model->parameters());
  const auto inputs = torch::randn({options.batch, 100}, options.floats());
  const auto targets = torch::randn({options.batch, 10}, options.floats());

  for (int64_t i = 0; i < options.steps; ++i) {
    const Mark mark("step");
    if (options.variant != "never") zero_grad(*optimizer, options.variant == "set_to_none");
    const auto loss = forward_pass(options, [&] {
      const auto outputs = scoped("linear", [&] { return model(inputs); });
      return scoped("loss", [&] { return torch::mse_loss(outputs, targets); });
    });
    backward(loss);
    step(*optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
