#pragma once

#include <torch/torch.h>

namespace samples {

/// What torch.amp.GradScaler does, written out: LibTorch has none. Scales the loss, so that small gradients survive in
/// float16, and skips steps whose gradients overflowed.
class GradScaler {
 public:
  explicit GradScaler(torch::Device device);

  torch::Tensor scale(const torch::Tensor& loss) const { return loss * scale_; }
  /// Divides the gradients by the scale, in place. Throws on float16 gradients, as PyTorch's does: they may have lost what
  /// the scale was to save.
  void unscale(const std::vector<torch::Tensor>& parameters);
  /// Whether the gradients that were unscaled are all finite. Waits for the device.
  bool is_finite() const { return found_inf_.item<float>() == 0; }
  /// Adapts the scale after a step.
  void update();

 private:
  torch::Tensor scale_;
  torch::Tensor growth_;
  torch::Tensor found_inf_;
};

}  // namespace samples
