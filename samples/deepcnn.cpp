// Three convolutions, each with ReLU and max pooling, and a classifier; images of 64x64. The published code of this case has
// a linear layer of 128*4*4 inputs, a shape error: three poolings of 64 leave 8.

#include "samples/training.h"

namespace samples {

namespace {

namespace nn = torch::nn;

struct DeepCnn : nn::Module {
  nn::Conv2d conv1{nn::Conv2dOptions(3, 32, 3).padding(1)};
  nn::Conv2d conv2{nn::Conv2dOptions(32, 64, 3).padding(1)};
  nn::Conv2d conv3{nn::Conv2dOptions(64, 128, 3).padding(1)};
  nn::Linear fc{128 * 8 * 8, 10};

  DeepCnn() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("conv3", conv3);
    register_module("fc", fc);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = block("conv1", "relu1", "pool1", conv1, x);
    x = block("conv2", "relu2", "pool2", conv2, x);
    x = block("conv3", "relu3", "pool3", conv3, x);
    SAMPLES_SCOPE("fc");
    return fc(x.flatten(1));
  }

 private:
  static torch::Tensor block(const char* conv_name, const char* relu_name, const char* pool_name, nn::Conv2d& conv,
                             torch::Tensor x) {
    {
      SAMPLES_SCOPE(conv_name);
      x = conv(x);
    }
    {
      SAMPLES_SCOPE(relu_name);
      x = torch::relu(x);
    }
    SAMPLES_SCOPE(pool_name);
    return torch::max_pool2d(x, 2);
  }
};

}  // namespace

void train_deepcnn(const Options& options) { train_classifier<DeepCnn>(options, 64); }

}  // namespace samples
