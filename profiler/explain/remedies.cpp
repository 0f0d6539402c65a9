#include "profiler/explain/remedies.h"

#include <algorithm>
#include <array>

#include "profiler/explain/explain.h"
#include "profiler/explain/remedy_rules.h"
#include "profiler/explain/what_if.h"
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

}  // namespace

BatchModel model_batch(const Moment& moment, int64_t refused_bytes, int64_t batch, int64_t room_bytes) {
  const auto sums = sum_categories(moment);
  BatchModel model{.batch = batch};
  model.scaling_bytes = at(sums, Category::activation) + at(sums, Category::input) + at(sums, Category::output) +
                        at(sums, Category::gradient_in_flight) + at(sums, Category::temporary) + refused_bytes;
  for (const LiveBlock& block : moment.blocks) {
    const bool follows = block.category == Category::workspace && workspace_follows_batch(block.made);
    model.scaling_bytes += follows ? block.bytes : 0;
  }
  model.fixed_bytes = moment.allocated_bytes + refused_bytes - model.scaling_bytes;
  const int64_t room = room_bytes - model.fixed_bytes;
  if (room > 0 && model.scaling_bytes > 0) model.largest_batch = scaled(batch, room, model.scaling_bytes);
  if (refused_bytes > 0) model.largest_batch = std::min(model.largest_batch, batch - 1);
  return model;
}

std::vector<Remedy> predict_remedies(const Situation& situation) {
  constexpr std::array kRules = {halve_batch,         fit_batch,          accumulate,    use_autocast,
                                 checkpoint_modules,  use_relu_in_place,  use_no_grad,   set_gradients_to_none,
                                 use_fused_optimizer, use_loop_optimizer, use_plain_sgd, drop_outputs,
                                 stop_growth};
  std::vector<Remedy> remedies;
  if (situation.lives.step == 0) return remedies;
  constexpr int64_t kLeastShare = 100;  // what saves less than a hundredth helps nobody
  // The peak may be that of another step; the difference that a remedy makes to this one is taken off it.
  const int64_t peak = find_peak(situation.lives.blocks);
  for (const auto rule : kRules) {
    const std::optional<Changed> changed = rule(situation);
    if (!changed) continue;
    const int64_t saved = peak - find_peak(changed->blocks);
    if (saved * kLeastShare < peak) continue;
    const int64_t left = std::max<int64_t>(0, situation.peak_bytes - saved);
    remedies.push_back({.id = changed->id,
                        .label = changed->label,
                        .formula = changed->formula,
                        .modules = changed->modules,
                        .predicted_peak_bytes = left,
                        .predicted_fits = left <= situation.room_bytes});
  }
  std::stable_sort(remedies.begin(), remedies.end(),
                   [](const Remedy& a, const Remedy& b) { return a.predicted_peak_bytes < b.predicted_peak_bytes; });
  return remedies;
}

Remedy predict_expandable_segments(const Moment& moment, int64_t refused_bytes, const Packing& packing,
                                   int64_t room_bytes) {
  return {.id = "expandable_segments",
          .label = "expandable_segments:True",
          .formula = "the same bytes, packed into whole pages: pack + request ≤ room",
          .predicted_peak_bytes = moment.allocated_bytes + refused_bytes,
          .predicted_fits = packing.pack_bytes + refused_bytes <= room_bytes};
}

}  // namespace oomdiag
