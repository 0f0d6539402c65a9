// A trained stem in front of frozen layers, whose weights are float32, half zeros, or int8 with a scale per row.

#include <cmath>

#include "samples/training.h"

namespace samples {

namespace {

constexpr int64_t kSize = 1024;
constexpr int kFrozenLayers = 8;

/// A frozen layer of int8 weights. Autograd keeps the weights as they are; float32 ones are made where they are needed.
struct Int8Linear : torch::autograd::Function<Int8Linear> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& weight, const torch::Tensor& scale) {
    context->save_for_backward({weight, scale});
    return x.matmul((weight * scale).t());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[0] * saved[1]), torch::Tensor(), torch::Tensor()};
  }
};

struct Weights {
  torch::Tensor values, scale;
};

/// What a tool would leave of a trained weight.
Weights shrink(const torch::Tensor& weight, const std::string& variant) {
  if (variant == "half_zeros") return {weight * (weight.abs() > weight.abs().median()), {}};
  if (variant != "int8") return {weight, {}};
  const auto scale = weight.abs().amax(1, /*keepdim=*/true) / 127;
  return {(weight / scale).round().to(torch::kChar), scale};
}

std::vector<Weights> load_weights(const Options& options) {
  const torch::NoGradGuard no_grad;
  std::vector<Weights> weights;
  for (int i = 0; i < kFrozenLayers; ++i) {
    const auto trained = torch::randn({kSize, kSize}) * std::sqrt(2.0 / kSize);
    const auto shrunk = shrink(trained, options.variant);
    SAMPLES_SCOPE("weights");
    weights.push_back(
        {shrunk.values.to(options.device), shrunk.scale.defined() ? shrunk.scale.to(options.device) : shrunk.scale});
  }
  return weights;
}

torch::Tensor apply(const Weights& layer, const torch::Tensor& x) {
  return layer.scale.defined() ? Int8Linear::apply(x, layer.values, layer.scale) : x.matmul(layer.values.t());
}

}  // namespace

void train_pruned(const Options& options) {
  torch::nn::Linear stem(kSize, kSize);
  move_to(*stem, options);
  const auto weights = load_weights(options);
  const auto optimizer = make_optimizer(options, stem->parameters());
  const auto inputs = torch::randn({options.batch, kSize}, options.floats());

  for (int64_t i = 0; i < options.steps; ++i) {
    zero_grad(*optimizer);
    const auto loss = forward_pass(options, [&] {
      auto x = scoped("stem", [&] { return stem(inputs); });
      for (size_t k = 0; k < weights.size(); ++k) {
        x = scoped("frozen" + std::to_string(k), [&] { return torch::relu(apply(weights[k], x)); });
      }
      return scoped("loss", [&] { return x.square().mean(); });
    });
    backward(loss);
    step(*optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
