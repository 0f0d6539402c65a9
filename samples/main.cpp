// The reference training loops as one ordinary LibTorch program. `oomdiag train` runs it and diagnoses it from outside, like
// anybody's program.

#include <CLI/CLI.hpp>
#include <algorithm>

#include "samples/host_memory.h"
#include "samples/models.h"

namespace samples {

namespace {

int fail(const std::string& what) {
  std::cerr << "oomdiag_samples: error: " << what.substr(0, what.find('\n')) << '\n';
  return 1;
}

int run_on_gpu(const Options& options) {
  const Model& model = *find_model(options.model);
  if (model.prepare != nullptr) model.prepare(options);
  // LibTorch asks for the device count only when a device is used; a program that asks first can be diagnosed on any device.
  if (torch::cuda::device_count() == 0) return fail("no CUDA device");
  // The allocator is made now, so that whoever watches it misses nothing of the first tensor.
  at::globalContext().lazyInitDevice(torch::kCUDA);
  torch::cuda::synchronize();
  model.run(options);
  torch::cuda::synchronize();
  return 0;
}

// The CPU allocator reports to whoever holds the profiler's slot. Nobody profiles here, so it may be taken.
int run_on_host(const Options& options) {
  const std::shared_ptr<c10::DebugInfoBase> reporter(&host_memory(), [](c10::DebugInfoBase*) {});
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reporter);
  find_model(options.model)->run(options);
  host_memory().print_facts();
  return 0;
}

/// Fills in what the command line left open. False if the variant is not one of the model's.
bool complete(Options& options, const Model& model) {
  if (options.batch == 0) options.batch = model.batch;
  if (options.steps == 0) options.steps = model.steps;
  if (options.optimizer.empty()) options.optimizer = model.optimizer;
  if (options.variant.empty() && !model.variants.empty()) options.variant = model.variants.front();
  return options.variant.empty() ||
         std::find(model.variants.begin(), model.variants.end(), options.variant) != model.variants.end();
}

}  // namespace

}  // namespace samples

int main(int argc, char** argv) try {
  samples::Options options{.optimizer = ""};
  std::string device = "cuda";
  bool list = false;
  CLI::App app("Trains a reference model with LibTorch.");
  app.add_option("--model", options.model);
  app.add_option("--variant", options.variant);
  app.add_option("--batch", options.batch)->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber);
  app.add_option("--optimizer", options.optimizer)->check(CLI::IsMember({"adam", "adamw", "sgd", "momentum"}));
  app.add_option("--amp", options.amp)->check(CLI::IsMember({"none", "bf16", "fp16"}));
  app.add_option("--accumulate", options.accumulate)->check(CLI::PositiveNumber);
  app.add_option("--device", device)->check(CLI::IsMember({"cuda", "cpu"}));
  app.add_flag("--list-json", list, "list the models");
  CLI11_PARSE(app, argc, argv);
  if (list) {
    std::cout << samples::list_models();
    return 0;
  }
  const samples::Model* model = samples::find_model(options.model);
  if (model == nullptr) return samples::fail("no model " + options.model);
  if (options.accumulate > 1 && !model->accumulates) return samples::fail(options.model + " does not accumulate");
  if (!samples::complete(options, *model)) return samples::fail("no variant " + options.variant);
  options.device = torch::Device(device);
  return options.device.is_cuda() ? samples::run_on_gpu(options) : samples::run_on_host(options);
} catch (const std::exception& error) {
  return samples::fail(error.what());
}
