// Mixed precision: autocast with a GradScaler beside plain float32; and a whole model in float16.

#include "samples/deepcnn.h"
#include "samples/grad_scaler.h"
#include "samples/training.h"

namespace samples {

GradScaler::GradScaler(torch::Device device)
    : scale_(torch::full({}, 65536.0, torch::dtype(torch::kFloat).device(device))),
      growth_(torch::zeros({}, torch::dtype(torch::kInt).device(device))),
      found_inf_(torch::zeros({}, torch::dtype(torch::kFloat).device(device))) {}

void GradScaler::unscale(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : parameters) {
    TORCH_CHECK(parameter.grad().scalar_type() != torch::kHalf, "Attempting to unscale FP16 gradients.");
    gradients.push_back(parameter.grad());
  }
  found_inf_.zero_();
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf_, scale_.reciprocal());
}

void GradScaler::update() { at::_amp_update_scale_(scale_, growth_, found_inf_, 2.0, 0.5, 2000); }

namespace {

void train_scaled(DeepCnn& model, const Options& options, std::string_view autocast_type, torch::ScalarType type) {
  GradScaler scaler(options.device);
  const auto optimizer = make_optimizer(options, model.parameters());
  const auto images = torch::randn({options.batch, 3, 64, 64}, options.floats()).to(type);
  const auto labels = torch::randint(10, {options.batch}, options.longs());

  for (int64_t i = 0; i < options.steps; ++i) {
    zero_grad(*optimizer);
    const auto loss = forward_pass(options, [&] {
      const Autocast autocast(options, autocast_type);
      return classify(model.forward(images), labels);
    });
    backward(scaler.scale(loss));
    scaler.unscale(model.parameters());
    if (scaler.is_finite()) step(*optimizer, options);
    scaler.update();
    print_loss(options, loss);
  }
}

}  // namespace

void train_amp(const Options& options) {
  if (options.variant == "float32") return train_classifier<DeepCnn>(options, 64);
  DeepCnn model;
  move_to(model, options);
  // Hosts are slow at float16.
  train_scaled(model, options, options.device.is_cpu() ? "bf16" : "fp16", torch::kFloat);
}

void train_half(const Options& options) try {
  if (options.variant == "float32") return train_classifier<DeepCnn>(options, 64);
  DeepCnn model;
  model.to(torch::kHalf);
  move_to(model, options);
  train_scaled(model, options, "none", torch::kHalf);
} catch (const c10::OutOfMemoryError&) {
  throw;
} catch (const c10::Error& error) {
  print_fact("raised", error.what_without_backtrace());
}

}  // namespace samples
