#include "samples/training.h"

#include "samples/host_memory.h"

namespace samples {

Mark::Mark(const std::string& name) : scope_(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE)) {
  if (scope_->isActive()) scope_->before("sample#" + name);
  host_memory().enter(name);
}

void Mark::end() {
  if (!scope_) return;
  scope_.reset();
  host_memory().leave();
}

void print_loss(const Options& options, const torch::Tensor& loss) {
  if (options.device.is_cpu()) print_fact("loss", loss.item<float>());
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options, std::vector<torch::Tensor> parameters) {
  using namespace torch::optim;
  if (options.optimizer == "adam") return std::make_unique<Adam>(parameters, AdamOptions(1e-3));
  if (options.optimizer == "adamw") return std::make_unique<AdamW>(parameters, AdamWOptions(1e-3));
  if (options.optimizer == "momentum") return std::make_unique<SGD>(parameters, SGDOptions(0.01).momentum(0.9));
  return std::make_unique<SGD>(parameters, SGDOptions(0.01));
}

void step(torch::optim::Optimizer& optimizer, const Options& options) {
  const std::string name = options.optimizer == "adam" ? "Adam" : options.optimizer == "adamw" ? "AdamW" : "SGD";
  const Mark mark("optimizer");
  SAMPLES_SCOPE("Optimizer.step#" + name + ".step");
  optimizer.step();
}

void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
  const Mark mark("zero_grad");
  optimizer.zero_grad(set_to_none);
}

void backward(const torch::Tensor& loss, bool retain_graph) {
  const Mark mark("backward");
  loss.backward({}, retain_graph);
}

Autocast::Autocast(const Options& options, std::string_view type)
    : device_(options.device.type()), on_(type != "none") {
  if (!on_) return;
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(device_, type == "bf16" ? torch::kBFloat16 : torch::kHalf);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (!on_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, false);
}

}  // namespace samples
