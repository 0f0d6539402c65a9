// The reference training loops as one ordinary LibTorch program. `oomdiag train` runs it and diagnoses it from outside, like
// anybody's program.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>

#include "samples/training.h"

namespace samples {

namespace {

struct Model {
  const char* name;
  const char* reference_case;  ///< row of the reference cases
  int64_t default_batch;
  const char* about;
  void (*train)(const Options&);
};

constexpr Model kModels[] = {
    {"deepcnn", "S7", 64, "three convolutions with ReLU and max pooling, images of 64x64, Adam", train_deepcnn},
    {"simplecnn", "S6", 128, "one convolution with ReLU and max pooling, images of 32x32, Adam", train_simplecnn},
};

// Nothing here needs escaping.
void list_models() {
  const char* separator = "[";
  for (const Model& model : kModels) {
    std::cout << separator << R"({"name": ")" << model.name << R"(", "case": ")" << model.reference_case
              << R"(", "variants": [], "default_batch": )" << model.default_batch << R"(, "about": ")" << model.about
              << "\"}";
    separator = ",\n ";
  }
  std::cout << "]\n";
}

const Model* find_model(const std::string& name) {
  for (const Model& model : kModels) {
    if (name == model.name) return &model;
  }
  return nullptr;
}

int train(const Options& options) {
  // LibTorch asks for the device count only when a device is used; a program that asks first can be diagnosed on any device.
  if (options.device.is_cuda() && torch::cuda::device_count() == 0) {
    std::cerr << "oomdiag_samples: error: no CUDA device\n";
    return 1;
  }
  find_model(options.model)->train(options);
  if (options.device.is_cuda()) torch::cuda::synchronize();
  return 0;
}

}  // namespace

}  // namespace samples

int main(int argc, char** argv) try {
  samples::Options options;
  std::string device = "cuda";
  bool list = false;
  CLI::App app("Trains a reference model with LibTorch.");
  app.add_option("--model", options.model)->check([](const std::string& name) {
    return samples::find_model(name) != nullptr ? std::string() : "no model " + name;
  });
  const auto* batch = app.add_option("--batch", options.batch)->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber);
  app.add_option("--optimizer", options.optimizer)->check(CLI::IsMember({"adam", "adamw", "sgd", "momentum"}));
  app.add_option("--amp", options.amp)->check(CLI::IsMember({"none", "bf16", "fp16"}));
  app.add_option("--device", device)->check(CLI::IsMember({"cuda", "cpu"}));
  app.add_flag("--list-json", list, "list the models");
  CLI11_PARSE(app, argc, argv);
  if (list) {
    samples::list_models();
    return 0;
  }
  if (batch->count() == 0) options.batch = samples::find_model(options.model)->default_batch;
  options.device = torch::Device(device);
  return samples::train(options);
} catch (const std::exception& error) {
  const std::string what = error.what();
  std::cerr << "oomdiag_samples: error: " << what.substr(0, what.find('\n')) << '\n';
  return 1;
}
