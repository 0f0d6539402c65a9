// One convolution and a classifier; images of 32x32, batches of 128.

#include "samples/training.h"

namespace samples {

namespace {

namespace nn = torch::nn;

struct SimpleCnn : nn::Module {
  nn::Conv2d conv{nn::Conv2dOptions(3, 16, 3).padding(1)};
  nn::Linear fc{16 * 16 * 16, 10};

  SimpleCnn() {
    register_module("conv", conv);
    register_module("fc", fc);
  }

  torch::Tensor forward(torch::Tensor x) {
    {
      SAMPLES_SCOPE("conv");
      x = conv(x);
    }
    {
      SAMPLES_SCOPE("relu");
      x = torch::relu(x);
    }
    {
      SAMPLES_SCOPE("pool");
      x = torch::max_pool2d(x, 2);
    }
    SAMPLES_SCOPE("fc");
    return fc(x.flatten(1));
  }
};

}  // namespace

void train_simplecnn(const Options& options) { train_classifier<SimpleCnn>(options, 32); }

}  // namespace samples
