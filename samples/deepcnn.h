#pragma once

namespace samples {

/// Three convolutions, each with ReLU and max pooling, and a classifier; images of 64x64. The published code of this case
/// has a linear layer of 128*4*4 inputs, a shape error: three poolings of 64 leave 8.
struct DeepCnn : torch::nn::Module {
  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(3, 32, 3).padding(1)};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(32, 64, 3).padding(1)};
  torch::nn::Conv2d conv3{torch::nn::Conv2dOptions(64, 128, 3).padding(1)};
  torch::nn::Linear fc{128 * 8 * 8, 10};

  DeepCnn();
  torch::Tensor forward(torch::Tensor x);
};

}  // namespace samples
