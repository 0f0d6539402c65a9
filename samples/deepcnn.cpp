#include "samples/deepcnn.h"

#include "samples/training.h"

namespace samples {

DeepCnn::DeepCnn() {
  register_module("conv1", conv1);
  register_module("conv2", conv2);
  register_module("conv3", conv3);
  register_module("fc", fc);
}

torch::Tensor DeepCnn::forward(torch::Tensor x) {
  x = scoped("conv1", [&] { return conv1(x); });
  x = scoped("relu1", [&] { return torch::relu(x); });
  x = scoped("pool1", [&] { return torch::max_pool2d(x, 2); });
  x = scoped("conv2", [&] { return conv2(x); });
  x = scoped("relu2", [&] { return torch::relu(x); });
  x = scoped("pool2", [&] { return torch::max_pool2d(x, 2); });
  x = scoped("conv3", [&] { return conv3(x); });
  x = scoped("relu3", [&] { return torch::relu(x); });
  x = scoped("pool3", [&] { return torch::max_pool2d(x, 2); });
  return scoped("fc", [&] { return fc(x.flatten(1)); });
}

void train_deepcnn(const Options& options) { train_classifier<DeepCnn>(options, 64); }

}  // namespace samples
