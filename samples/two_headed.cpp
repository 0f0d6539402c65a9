// Two losses: a trunk with two heads, or an encoder for each.

#include "samples/training.h"

namespace samples {

namespace {

torch::nn::Sequential make_encoder() { return torch::nn::Sequential(torch::nn::Linear(256, 1024), torch::nn::ReLU()); }

torch::nn::Sequential make_head(int64_t width, int64_t outputs) {
  return torch::nn::Sequential(torch::nn::Linear(1024, width), torch::nn::ReLU(), torch::nn::Linear(width, outputs));
}

struct TwoHeaded : torch::nn::Module {
  torch::nn::Sequential trunk = make_encoder();
  torch::nn::Sequential second_trunk = nullptr;
  torch::nn::Sequential head_a = make_head(2048, 100);
  torch::nn::Sequential head_b = make_head(512, 1);

  explicit TwoHeaded(bool two_encoders) {
    register_module("trunk", trunk);
    if (two_encoders) second_trunk = register_module("second_trunk", make_encoder());
    register_module("head_a", head_a);
    register_module("head_b", head_b);
  }

  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    auto first = scoped("trunk", [&] { return trunk->forward(x); });
    auto second = second_trunk ? scoped("second_trunk", [&] { return second_trunk->forward(x); }) : first;
    auto a = scoped("head_a", [&] { return head_a->forward(first); });
    auto b = scoped("head_b", [&] { return head_b->forward(second); });
    return {a, b};
  }
};

}  // namespace

void train_two_headed(const Options& options) {
  TwoHeaded model(options.variant == "two_encoders");
  move_to(model, options);
  const auto optimizer = make_optimizer(options, model.parameters());
  const auto inputs = torch::randn({options.batch, 256}, options.floats());
  const auto labels = torch::randint(100, {options.batch}, options.longs());
  const auto values = torch::randn({options.batch, 1}, options.floats());

  for (int64_t i = 0; i < options.steps; ++i) {
    zero_grad(*optimizer);
    torch::Tensor second_loss;
    const auto loss = forward_pass(options, [&] {
      const auto [a, b] = model.forward(inputs);
      second_loss = scoped("loss_b", [&] { return torch::mse_loss(b, values); });
      return scoped("loss_a", [&] { return torch::cross_entropy_loss(a, labels); });
    });
    if (options.variant == "two_backwards") {
      backward(loss, /*retain_graph=*/true);  // the second still needs the trunk
      backward(second_loss);
    } else {
      backward(loss + second_loss);
    }
    step(*optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
