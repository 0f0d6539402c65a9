// ResNet-50, images of 224x224: the same layers and names as torchvision's.

#include "samples/training.h"

namespace samples {

namespace {

namespace nn = torch::nn;

nn::Conv2d convolution(int64_t in, int64_t out, int64_t size, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

/// 1x1, 3x3, 1x1 with four times the channels, and a way around.
struct Bottleneck : nn::Module {
  nn::Conv2d conv1, conv2, conv3;
  nn::BatchNorm2d bn1, bn2, bn3;
  nn::Sequential downsample = nullptr;

  Bottleneck(int64_t in, int64_t width, int64_t stride)
      : conv1(convolution(in, width, 1, 1)),
        conv2(convolution(width, width, 3, stride)),
        conv3(convolution(width, 4 * width, 1, 1)),
        bn1(width),
        bn2(width),
        bn3(4 * width) {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("conv2", conv2);
    register_module("bn2", bn2);
    register_module("conv3", conv3);
    register_module("bn3", bn3);
    if (stride == 1 && in == 4 * width) return;
    downsample = nn::Sequential(convolution(in, 4 * width, 1, stride), nn::BatchNorm2d(4 * width));
    register_module("downsample", downsample);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    auto y = scoped("conv1", [&] { return conv1(x); });
    y = scoped("bn1", [&] { return bn1(y).relu_(); });
    y = scoped("conv2", [&] { return conv2(y); });
    y = scoped("bn2", [&] { return bn2(y).relu_(); });
    y = scoped("conv3", [&] { return conv3(y); });
    y = scoped("bn3", [&] { return bn3(y); });
    const auto around = downsample ? scoped("downsample", [&] { return downsample->forward(x); }) : x;
    return scoped("relu", [&] { return torch::relu_(y.add_(around)); });
  }
};

struct ResNet50 : nn::Module {
  nn::Conv2d conv1 = nn::Conv2d(nn::Conv2dOptions(3, 64, 7).stride(2).padding(3).bias(false));
  nn::BatchNorm2d bn1{64};
  std::vector<std::pair<std::string, std::shared_ptr<Bottleneck>>> blocks;
  nn::Linear fc{2048, 1000};

  ResNet50() {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    add_layer(1, 64, 3, 1);
    add_layer(2, 128, 4, 2);
    add_layer(3, 256, 6, 2);
    add_layer(4, 512, 3, 2);
    register_module("fc", fc);
  }

  void add_layer(int number, int64_t width, int64_t count, int64_t stride) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t in = i > 0 ? 4 * width : number == 1 ? 64 : 2 * width;
      const auto block = std::make_shared<Bottleneck>(in, width, i == 0 ? stride : 1);
      register_module("layer" + std::to_string(number) + "_" + std::to_string(i), block);
      blocks.emplace_back("layer" + std::to_string(number) + "." + std::to_string(i), block);
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    x = scoped("conv1", [&] { return conv1(x); });
    x = scoped("bn1", [&] { return bn1(x).relu_(); });
    x = scoped("maxpool", [&] { return torch::max_pool2d(x, 3, 2, 1); });
    for (const auto& [name, block] : blocks) x = scoped(name, [&, &run = block] { return run->forward(x); });
    x = scoped("avgpool", [&] { return torch::adaptive_avg_pool2d(x, {1, 1}); });
    return scoped("fc", [&] { return fc(x.flatten(1)); });
  }
};

}  // namespace

void train_resnet50(const Options& options) { train_classifier<ResNet50>(options, 224, 1000); }

}  // namespace samples
