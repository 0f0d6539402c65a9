// Memory that grows from step to step, because something is kept: a loss that was never run backward keeps its whole graph,
// one that was keeps next to nothing.

#include "samples/training.h"

namespace samples {

namespace {

struct Small : torch::nn::Module {
  torch::nn::Linear fc1{100, 1024};
  torch::nn::Linear fc2{1024, 10};

  Small() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = scoped("fc1", [&] { return fc1(x); });
    x = scoped("relu", [&] { return torch::relu(x); });
    return scoped("fc2", [&] { return fc2(x); });
  }
};

void multiply_and_keep(const Options& options) {
  std::vector<torch::Tensor> kept;
  for (int64_t i = 0; i < options.steps; ++i) {
    const Mark mark("step");
    const auto a = scoped("a", [&] { return torch::randn({100, 100}, options.floats()); });
    const auto b = scoped("b", [&] { return torch::randn({100, 100}, options.floats()); });
    const auto c = scoped("c", [&] { return a.matmul(b); });
    kept.insert(kept.end(), {a, b, c});
  }
}

}  // namespace

void train_growing(const Options& options) {
  if (options.variant == "matmul") return multiply_and_keep(options);
  Small model;
  move_to(model, options);
  const auto optimizer = make_optimizer(options, model.parameters());
  const auto inputs = torch::randn({options.batch, 100}, options.floats());
  const auto labels = torch::randint(10, {options.batch}, options.longs());

  std::vector<torch::Tensor> losses;
  std::vector<float> numbers;
  for (int64_t i = 0; i < options.steps; ++i) {
    const Mark mark("step");
    zero_grad(*optimizer);
    const auto loss = forward_pass(options, [&] { return classify(model.forward(inputs), labels); });
    if (options.variant != "validation_losses") {  // validation looks at the loss only, but without no_grad
      backward(loss, options.variant == "retained_graph");
      step(*optimizer, options);
    }
    if (options.variant == "items") {
      numbers.push_back(loss.item<float>());
    } else {
      losses.push_back(loss);
    }
    print_loss(options, loss);
  }
}

}  // namespace samples
