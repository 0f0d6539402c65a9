// Activation checkpointing: a deep MLP in segments. Each keeps only its input for backward, and runs forward again there.

#include <span>

#include "samples/training.h"

namespace samples {

namespace {

constexpr int64_t kWidth = 512;
constexpr size_t kLayers = 16;

struct Layer {
  std::string name;
  torch::nn::Linear linear;
};
using Segment = std::span<const Layer>;

torch::Tensor run(Segment segment, torch::Tensor x) {
  for (const Layer& layer : segment) {
    x = scoped(layer.name, [&] { return torch::relu(torch::nn::Linear(layer.linear)(x)); });
  }
  return x;
}

/// LibTorch has no checkpoint function. The gradients of the segment's parameters are accumulated by the inner backward.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const Segment* segment) {
    context->save_for_backward({x});
    context->saved_data["segment"] = reinterpret_cast<int64_t>(segment);
    return run(*segment, x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto* segment = reinterpret_cast<const Segment*>(context->saved_data["segment"].toInt());
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::Tensor y;
    {
      const torch::AutoGradMode gradients_on(true);
      y = run(*segment, x);
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

std::vector<Layer> make_layers(const Options& options) {
  std::vector<Layer> layers;
  for (size_t i = 0; i < kLayers; ++i) {
    layers.push_back({"layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)});
    move_to(*layers.back().linear, options);
  }
  return layers;
}

std::vector<torch::Tensor> parameters_of(const std::vector<Layer>& layers) {
  std::vector<torch::Tensor> parameters;
  for (const Layer& layer : layers) parameters.insert(parameters.end(), {layer.linear->weight, layer.linear->bias});
  return parameters;
}

/// "segments_4" → 4; "whole" → 0.
size_t segments_of(const std::string& variant) {
  return variant == "whole" ? 0 : std::stoul(variant.substr(variant.find('_') + 1));
}

std::vector<Segment> cut(const std::vector<Layer>& layers, size_t segments) {
  std::vector<Segment> cuts;
  const size_t each = segments == 0 ? 0 : layers.size() / segments;
  for (size_t i = 0; i < segments; ++i) cuts.push_back(Segment(layers).subspan(i * each, each));
  return cuts;
}

}  // namespace

void train_checkpoint(const Options& options) {
  const auto layers = make_layers(options);
  const auto segments = cut(layers, segments_of(options.variant));
  const auto optimizer = make_optimizer(options, parameters_of(layers));
  print_fact("layers", layers.size());
  // A checkpoint whose input needs no gradient would make no node, and its parameters would get none.
  const auto inputs = torch::randn({options.batch, kWidth}, options.floats()).requires_grad_(!segments.empty());

  for (int64_t i = 0; i < options.steps; ++i) {
    zero_grad(*optimizer);
    const auto loss = forward_pass(options, [&] {
      torch::Tensor x = segments.empty() ? run(layers, inputs) : inputs;
      for (const Segment& segment : segments) x = Checkpoint::apply(x, &segment);
      return scoped("loss", [&] { return x.square().mean(); });
    });
    backward(loss);
    step(*optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
