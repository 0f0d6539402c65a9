// Outputs that a name still holds when backward() runs, and when the next forward pass does. The net gives one map per pixel,
// so that its outputs are worth keeping.

#include <c10/cuda/CUDACachingAllocator.h>

#include "samples/training.h"

namespace samples {

namespace {

struct Segmenter : torch::nn::Module {
  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(3, 32, 3).padding(1)};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(32, 32, 3).padding(1)};

  Segmenter() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = scoped("conv1", [&] { return conv1(x); });
    x = scoped("relu1", [&] { return torch::relu(x); });
    return scoped("conv2", [&] { return conv2(x); });
  }
};

void delete_outputs(torch::Tensor& outputs, const Options& options) {
  const Mark mark("delete_outputs");
  outputs.reset();
  if (options.device.is_cuda()) c10::cuda::CUDACachingAllocator::emptyCache();
}

void try_backward(const torch::Tensor& loss) try { backward(loss); } catch (const c10::Error& error) {
  print_fact("raised", error.what_without_backtrace());
}

}  // namespace

void train_kept_outputs(const Options& options) {
  Segmenter model;
  move_to(model, options);
  const auto optimizer = make_optimizer(options, model.parameters());
  const auto images = torch::randn({options.batch, 3, 64, 64}, options.floats());
  const auto targets = torch::randn({options.batch, 32, 64, 64}, options.floats());

  torch::Tensor outputs;  // lives longer than a step
  for (int64_t i = 0; i < options.steps; ++i) {
    zero_grad(*optimizer);
    const torch::AutoGradMode gradients(options.variant != "no_grad");
    const auto loss = forward_pass(options, [&] {
      outputs = model.forward(images);
      return scoped("loss", [&] { return torch::mse_loss(outputs, targets); });
    });
    if (options.variant == "deleted") delete_outputs(outputs, options);
    if (options.variant == "no_grad") return try_backward(loss);
    backward(loss);
    step(*optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
