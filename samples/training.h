#pragma once

// What the sample loops have in common. They are ordinary LibTorch programs and know nothing of oomdiag: LibTorch has no
// module hooks and its optimizers open no scopes, so the samples open a user scope per layer and per part of the loop.

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <iostream>
#include <string>

namespace samples {

/// What the command line asks for.
struct Options {
  std::string model = "deepcnn";
  std::string variant{};  ///< one of the model's, or empty if it has none
  int64_t batch = 0;
  int64_t steps = 0;
  std::string optimizer = "adam";  ///< adam, adamw, sgd, momentum
  std::string amp = "none";        ///< none, bf16, fp16
  int64_t accumulate = 1;          ///< micro-batches of a step
  torch::Device device = torch::kCUDA;

  torch::TensorOptions floats() const { return torch::dtype(torch::kFloat).device(device); }
  torch::TensorOptions longs() const { return torch::dtype(torch::kLong).device(device); }
};

/// A scope with this name from here to the end of the block: a layer, which becomes part of the path of modules.
#define SAMPLES_SCOPE(name) RECORD_USER_SCOPE(name)

/// Calls `layer` in a scope of this name.
template <class Layer>
auto scoped(const std::string& name, const Layer& layer) {
  SAMPLES_SCOPE(name);
  return layer();
}

/// A part of the loop, from here to end() or the end of the block: a scope that is no module, "sample#forward". On the host
/// it is also the phase whose bytes are counted.
class Mark {
 public:
  explicit Mark(const std::string& name);
  ~Mark() { end(); }
  Mark(const Mark&) = delete;
  void end();

 private:
  std::unique_ptr<at::RecordFunction> scope_;
};

/// Prints a fact about this run on stdout, for whoever compares runs: "fact pinned_host_bytes 1048576".
template <class Value>
void print_fact(std::string_view name, const Value& value) {
  std::cout << "fact " << name << ' ' << value << '\n';
}

/// Prints the loss, on the host only: on a GPU that would wait for it.
void print_loss(const Options& options, const torch::Tensor& loss);

/// Moves `module` without making autograd nodes of the move.
template <class Module>
void move_to(Module& module, const Options& options) {
  const torch::NoGradGuard no_grad;
  module.to(options.device);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options, std::vector<torch::Tensor> parameters);

/// One optimizer step, in the scope that PyTorch's Python optimizers open: "Optimizer.step#Adam.step"; likewise the next.
void step(torch::optim::Optimizer& optimizer, const Options& options);
void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none = true);

/// loss.backward(), marked.
void backward(const torch::Tensor& loss, bool retain_graph = false);

/// Whether the options ask for autocast, from here to the end of the block.
class Autocast {
 public:
  Autocast(const Options& options, std::string_view type);
  ~Autocast();
  Autocast(const Autocast&) = delete;

 private:
  torch::DeviceType device_;
  bool on_;
};

/// Runs `forward`, which returns the loss, marked, and under autocast where the options ask for it.
template <class Forward>
torch::Tensor forward_pass(const Options& options, const Forward& forward) {
  const Mark mark("forward");
  const Autocast autocast(options, options.amp);
  return forward();
}

/// The loss of a classifier.
inline torch::Tensor classify(const torch::Tensor& scores, const torch::Tensor& labels) {
  SAMPLES_SCOPE("loss");
  return torch::cross_entropy_loss(scores, labels);
}

/// Forward and backward of one step: of the whole batch, or of its micro-batches one after the other, with gradients that add up
/// to the same. `loss_of(inputs, labels)` is a mean over its examples. Returns the (last) loss.
template <class LossOf>
torch::Tensor run_passes(const Options& options, const torch::Tensor& inputs, const torch::Tensor& labels,
                         const LossOf& loss_of) {
  torch::Tensor loss;
  const auto parts = inputs.chunk(options.accumulate), targets = labels.chunk(options.accumulate);
  for (size_t i = 0; i < parts.size(); ++i) {
    const double share = static_cast<double>(parts[i].size(0)) / static_cast<double>(inputs.size(0));
    loss = forward_pass(options, [&] { return loss_of(parts[i], targets[i]); });
    backward(parts.size() == 1 ? loss : loss * share);
  }
  return loss;
}

/// The classic loop: classifies images of `size` x `size` with cross entropy.
template <class Model>
void train_classifier(const Options& options, int64_t size, int64_t classes = 10) {
  Model model;
  move_to(model, options);
  const auto optimizer = make_optimizer(options, model.parameters());
  const auto images = torch::randn({options.batch, 3, size, size}, options.floats());
  const auto labels = torch::randint(classes, {options.batch}, options.longs());

  for (int64_t i = 0; i < options.steps; ++i) {
    const Mark mark("step");
    zero_grad(*optimizer);
    const auto loss = run_passes(options, images, labels, [&](const auto& some, const auto& targets) {
      return classify(model.forward(some), targets);
    });
    step(*optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
