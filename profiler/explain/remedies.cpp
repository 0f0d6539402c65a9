#include "profiler/explain/remedies.h"

#include <algorithm>
#include <cmath>

#include "profiler/explain/explain.h"
#include "profiler/replay/rounding.h"

namespace oomdiag {
namespace {

int64_t at(const std::array<int64_t, kCategoryCount>& sums, Category category) {
  return sums[static_cast<size_t>(category)];
}

int64_t scaled(int64_t bytes, int64_t numerator, int64_t denominator) {
  const double result = static_cast<double>(bytes) * static_cast<double>(numerator) / static_cast<double>(denominator);
  return result < static_cast<double>(kMostBytes) ? static_cast<int64_t>(result) : kMostBytes;
}

// bf16 autocast: float32 activations take half the bytes, and what flows back through them too; against that, each
// parameter has a bf16 copy while the graph lives.
//   peak' = peak − A32/2 − F/2 ∙ A32/A + P/2     A: activations, A32: those that are float32, F: gradients in flight,
//                                                temporaries and the refused request, P: parameters
// Some ops stay float32 under autocast (softmax, norms, losses), so this is the most it can save.
std::optional<Remedy> predict_autocast(const Moment& moment, int64_t refused_bytes) {
  const auto sums = sum_categories(moment);
  int64_t float32_bytes = 0;
  for (const LiveBlock& block : moment.blocks) {
    if (block.category == Category::activation && block.shape.ends_with("float32")) float32_bytes += block.bytes;
  }
  if (float32_bytes == 0) return std::nullopt;
  const int64_t in_flight = at(sums, Category::gradient_in_flight) + at(sums, Category::temporary) + refused_bytes;
  const int64_t saved = float32_bytes / 2 + scaled(in_flight / 2, float32_bytes, at(sums, Category::activation));
  const int64_t peak = moment.allocated_bytes + refused_bytes - saved + at(sums, Category::parameter) / 2;
  return Remedy{.id = "autocast_bf16", .label = "bf16 autocast", .predicted_peak_bytes = peak};
}

// Checkpointing in √n segments (Chen et al., arXiv 1604.06174): of n saved tensors of equal size the inputs of s = ⌈√n⌉
// segments stay, and one segment at a time is computed again.
//   peak' = peak − A + A ∙ s/n + A/s
std::optional<Remedy> predict_checkpointing(const Moment& moment, int64_t refused_bytes) {
  const int64_t activations = at(sum_categories(moment), Category::activation);
  const auto saved = std::count_if(moment.blocks.begin(), moment.blocks.end(),
                                   [](const LiveBlock& block) { return block.category == Category::activation; });
  const auto segments = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(saved))));
  if (saved < 4) return std::nullopt;
  const int64_t kept = scaled(activations, segments, saved) + activations / segments;
  return Remedy{.id = "checkpoint",
                .label = "checkpointing, " + std::to_string(segments) + " segments",
                .predicted_peak_bytes = moment.allocated_bytes + refused_bytes - activations + kept};
}

// A smaller batch: the largest one that the line of model_batch lets fit.
std::optional<Remedy> predict_smaller_batch(const BatchModel& model) {
  if (model.largest_batch <= 0 || model.largest_batch >= model.batch) return std::nullopt;
  const int64_t peak = model.fixed_bytes + scaled(model.scaling_bytes, model.largest_batch, model.batch);
  return Remedy{.id = "batch_" + std::to_string(model.largest_batch),
                .label = "batch " + std::to_string(model.largest_batch),
                .predicted_peak_bytes = peak};
}

}  // namespace

BatchModel model_batch(const Moment& moment, int64_t refused_bytes, int64_t batch, int64_t room_bytes) {
  const auto sums = sum_categories(moment);
  BatchModel model{.batch = batch};
  model.scaling_bytes = at(sums, Category::activation) + at(sums, Category::input) + at(sums, Category::output) +
                        at(sums, Category::gradient_in_flight) + at(sums, Category::temporary) + refused_bytes;
  model.fixed_bytes = moment.allocated_bytes + refused_bytes - model.scaling_bytes;
  const int64_t room = room_bytes - model.fixed_bytes;
  if (room > 0 && model.scaling_bytes > 0) model.largest_batch = scaled(batch, room, model.scaling_bytes);
  return model;
}

std::vector<Remedy> predict_remedies(const Moment& moment, int64_t refused_bytes,
                                     const std::optional<BatchModel>& batch, int64_t room_bytes) {
  std::vector<Remedy> remedies;
  const auto add = [&](std::optional<Remedy> remedy) {
    if (!remedy || remedy->predicted_peak_bytes >= moment.allocated_bytes + refused_bytes) return;
    remedy->predicted_fits = remedy->predicted_peak_bytes <= room_bytes;
    remedies.push_back(std::move(*remedy));
  };
  add(predict_autocast(moment, refused_bytes));
  add(predict_checkpointing(moment, refused_bytes));
  if (batch) add(predict_smaller_batch(*batch));
  std::sort(remedies.begin(), remedies.end(),
            [](const Remedy& a, const Remedy& b) { return a.predicted_peak_bytes < b.predicted_peak_bytes; });
  return remedies;
}

Remedy predict_expandable_segments(const Moment& moment, int64_t refused_bytes, const Packing& packing,
                                   int64_t room_bytes) {
  return {.id = "expandable_segments",
          .label = "expandable_segments:True",
          .predicted_peak_bytes = moment.allocated_bytes + refused_bytes,
          .predicted_fits = packing.pack_bytes + refused_bytes <= room_bytes};
}

}  // namespace oomdiag
