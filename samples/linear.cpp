// "A batch of 2048 is too large": one pass over 10 000 rows of 100 numbers, from the host batch by batch or all on the GPU.

#include "samples/training.h"

namespace samples {

void train_linear(const Options& options) {
  constexpr int64_t kRows = 10000;
  torch::nn::Linear model(100, 2);
  move_to(*model, options);
  const auto optimizer = make_optimizer(options, model->parameters());
  const auto where = options.variant == "whole_data_set" ? options.device : torch::Device(torch::kCPU);
  const auto rows = scoped("data_set", [&] { return torch::randn({kRows, 100}).to(where); });
  const auto labels = scoped("labels", [&] { return torch::randint(2, {kRows}, torch::kLong).to(where); });

  for (int64_t i = 0; i < options.steps; ++i) {
    const int64_t first = i * options.batch % kRows;
    const int64_t count = std::min(options.batch, kRows - first);
    const auto inputs = scoped("load", [&] { return rows.narrow(0, first, count).to(options.device); });
    const auto targets = scoped("load", [&] { return labels.narrow(0, first, count).to(options.device); });
    zero_grad(*optimizer);
    const auto loss =
        forward_pass(options, [&] { return classify(scoped("linear", [&] { return model(inputs); }), targets); });
    backward(loss);
    step(*optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
