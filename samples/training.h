#pragma once

// What the sample loops have in common. They are ordinary LibTorch programs and know nothing of oomdiag: LibTorch has no
// module hooks and its optimizers open no scopes, so the samples open a user scope per layer and per optimizer step.

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <memory>
#include <string>

namespace samples {

/// What the command line asks for.
struct Options {
  std::string model = "deepcnn";
  int64_t batch = 64;
  int64_t steps = 2;
  std::string optimizer = "adam";  ///< adam, adamw, sgd, momentum
  std::string amp = "none";        ///< none, bf16, fp16
  torch::Device device = torch::kCUDA;
};

/// A scope with this name from here to the end of the block.
#define SAMPLES_SCOPE(name) RECORD_USER_SCOPE(name)

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options, std::vector<torch::Tensor> parameters);

/// One optimizer step, in the scope that PyTorch's Python optimizers open: "Optimizer.step#Adam.step".
void step(torch::optim::Optimizer& optimizer, const Options& options);

/// Runs `forward`, which returns the loss, under autocast where the options ask for it.
template <class Forward>
torch::Tensor forward_pass(const Options& options, Forward forward) {
  if (options.amp == "none") return forward();
  at::autocast::set_autocast_enabled(options.device.type(), true);
  at::autocast::set_autocast_dtype(options.device.type(), options.amp == "bf16" ? torch::kBFloat16 : torch::kHalf);
  at::autocast::increment_nesting();
  torch::Tensor loss = forward();
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(options.device.type(), false);
  return loss;
}

/// The classic loop: classifies images of `size` x `size` with cross entropy.
template <class Model>
void train_classifier(const Options& options, int64_t size) {
  Model model;
  {
    const torch::NoGradGuard no_grad;
    model.to(options.device);
  }
  const auto optimizer = make_optimizer(options, model.parameters());
  const auto images = torch::randn({options.batch, 3, size, size}, options.device);
  const auto labels = torch::randint(10, {options.batch}, torch::dtype(torch::kLong).device(options.device));

  for (int64_t i = 0; i < options.steps; ++i) {
    optimizer->zero_grad();
    const torch::Tensor loss = forward_pass(options, [&] {
      const auto scores = model.forward(images);
      SAMPLES_SCOPE("loss");
      return torch::cross_entropy_loss(scores, labels);
    });
    loss.backward();
    step(*optimizer, options);
  }
}

/// The models.
void train_deepcnn(const Options& options);
void train_simplecnn(const Options& options);

}  // namespace samples
