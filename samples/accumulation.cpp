// Gradient accumulation: four passes of a quarter of the batch and one optimizer step, against one pass of the whole. Two of
// the loops are wrong in ways that are seen in the wild.

#include "samples/deepcnn.h"
#include "samples/training.h"

namespace samples {

namespace {

constexpr int64_t kPasses = 4;

void run_pass(DeepCnn& model, const Options& options, int64_t batch, double scale) {
  const auto images = torch::randn({batch, 3, 64, 64}, options.floats());
  const auto labels = torch::randint(10, {batch}, options.longs());
  const auto loss = forward_pass(options, [&] { return classify(model.forward(images), labels) * scale; });
  backward(loss);
  print_loss(options, loss);
}

/// Wrong: the gradients of all other parameters stay kPasses times too large.
void scale_first_gradient(const DeepCnn& model) {
  const Mark mark("scale_gradient");
  const torch::NoGradGuard no_grad;
  model.parameters().front().mutable_grad().div_(kPasses);
}

}  // namespace

void train_accumulation(const Options& options) {
  DeepCnn model;
  move_to(model, options);
  const auto optimizer = make_optimizer(options, model.parameters());
  const bool whole = options.variant == "whole";
  const bool by_hand = options.variant == "one_gradient_scaled";
  const int64_t passes = whole ? 1 : kPasses;
  print_fact("gradients", model.parameters().size());

  for (int64_t i = 0; i < options.steps; ++i) {
    const Mark mark("step");
    if (options.variant != "zero_grad_inside") zero_grad(*optimizer);
    for (int64_t pass = 0; pass < passes; ++pass) {
      if (options.variant == "zero_grad_inside") zero_grad(*optimizer);  // wrong: forgets the passes before
      run_pass(model, options, options.batch / passes, by_hand ? 1 : 1.0 / static_cast<double>(passes));
    }
    if (by_hand) scale_first_gradient(model);
    step(*optimizer, options);
  }
}

}  // namespace samples
