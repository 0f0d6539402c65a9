// Every temporary of forward() has a name until forward() returns, against one name that is used again.

#include "samples/training.h"

namespace samples {

namespace {

struct Mlp : torch::nn::Module {
  torch::nn::Linear fc1{100, 50};
  torch::nn::Linear fc2{50, 20};
  torch::nn::Linear fc3{20, 2};

  Mlp() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    register_module("fc3", fc3);
  }

  torch::Tensor forward_named(const torch::Tensor& x) {
    Mark mark("layers");
    const auto a = scoped("fc1", [&] { return fc1(x); });
    const auto b = scoped("relu1", [&] { return torch::relu(a); });
    const auto c = scoped("fc2", [&] { return fc2(b); });
    const auto d = scoped("relu2", [&] { return torch::relu(c); });
    const auto e = scoped("fc3", [&] { return fc3(d); });
    mark.end();  // while the names still hold
    return e;
  }

  torch::Tensor forward_rebound(torch::Tensor x) {
    const Mark mark("layers");
    x = scoped("fc1", [&] { return fc1(x); });
    x = scoped("relu1", [&] { return torch::relu(x); });
    x = scoped("fc2", [&] { return fc2(x); });
    x = scoped("relu2", [&] { return torch::relu(x); });
    return scoped("fc3", [&] { return fc3(x); });
  }
};

}  // namespace

void train_mlp(const Options& options) {
  Mlp model;
  move_to(model, options);
  const auto optimizer = make_optimizer(options, model.parameters());
  const auto inputs = torch::randn({options.batch, 100}, options.floats());
  const auto labels = torch::randint(2, {options.batch}, options.longs());
  const bool named = options.variant == "named";

  for (int64_t i = 0; i < options.steps; ++i) {
    zero_grad(*optimizer);
    const auto loss = forward_pass(
        options, [&] { return classify(named ? model.forward_named(inputs) : model.forward_rebound(inputs), labels); });
    backward(loss);
    step(*optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
