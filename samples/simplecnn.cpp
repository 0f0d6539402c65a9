// One convolution and a classifier; images of 32x32, batches of 128.

#include "samples/training.h"

namespace samples {

namespace {

struct SimpleCnn : torch::nn::Module {
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(3, 16, 3).padding(1)};
  torch::nn::Linear fc{16 * 16 * 16, 10};

  SimpleCnn() {
    register_module("conv", conv);
    register_module("fc", fc);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = scoped("conv", [&] { return conv(x); });
    x = scoped("relu", [&] { return torch::relu(x); });
    x = scoped("pool", [&] { return torch::max_pool2d(x, 2); });
    return scoped("fc", [&] { return fc(x.flatten(1)); });
  }
};

}  // namespace

void train_simplecnn(const Options& options) { train_classifier<SimpleCnn>(options, 32); }

}  // namespace samples
