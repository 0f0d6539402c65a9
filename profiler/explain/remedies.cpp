#include "profiler/explain/remedies.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "profiler/explain/arena.h"
#include "profiler/explain/remedy_rules.h"
#include "profiler/explain/what_if.h"
#include "profiler/replay/rounding.h"

namespace oomdiag {
namespace {

void judge(const Situation& situation, int64_t peak_bytes, const Changed& changed, const AllocatorSettings& settings,
           Remedy& remedy) {
  remedy.predicted_peak_bytes = peak_bytes;
  remedy.at_least = !situation.whole || changed.at_least;
  if (peak_bytes > situation.room_bytes) {
    remedy.predicted_fits = false;
  } else if (!remedy.at_least) {
    const int64_t sure_bytes = situation.room_bytes - situation.private_pool_cached_bytes;
    if (fits_safely(changed.blocks, sure_bytes, settings)) {
      remedy.predicted_fits = true;
    } else if (!gets_through(changed.blocks, situation.room_bytes, settings)) {
      remedy.predicted_fits = false;
    }
  }
}

constexpr std::array<Rule, 21> kRules = {halve_batch,
                                         fit_batch,
                                         accumulate,
                                         use_autocast,
                                         checkpoint_modules,
                                         use_relu_in_place,
                                         use_no_grad,
                                         drop_outputs,
                                         stop_growth,
                                         set_gradients_to_none,
                                         use_fused_optimizer,
                                         use_loop_optimizer,
                                         use_plain_sgd,
                                         use_8bit_adam,
                                         offload_optimizer,
                                         shard_over_cards,
                                         train_adapters,
                                         use_fused_attention,
                                         use_chunked_cross_entropy,
                                         halve_sequence,
                                         offload_activations};

// What may be had together: each of another kind, and none that changes what is learned.
constexpr std::array<Rule, 6> kCombined = {checkpoint_modules,  use_autocast,        accumulate,
                                           use_fused_attention, use_fused_optimizer, use_relu_in_place};

bool is_python(const Lives& blocks) {
  return std::any_of(blocks.begin(), blocks.end(),
                     [](const BlockLife& block) { return block.made.source.find(".py:") != std::string_view::npos; });
}

// What saves less than a hundredth helps nobody.
bool saves_enough(const Situation& situation, const Changed& changed) {
  const int64_t peak = find_peak(situation.lives.blocks);
  return (peak - find_peak(changed.blocks)) * 100 >= peak;
}

Remedy remedy_of(const Situation& situation, const Changed& changed) {
  Remedy remedy{.id = changed.id,
                .label = changed.label,
                .formula = changed.formula,
                .modules = changed.modules,
                .how = is_python(situation.lives.blocks) ? changed.how : std::vector<std::string>(),
                .costs = changed.costs,
                .changes_training = changed.changes_training};
  // The peak may be that of another step; the difference that a remedy makes to this one is taken off it.
  const int64_t saved = find_peak(situation.lives.blocks) - find_peak(changed.blocks);
  judge(situation, std::max<int64_t>(0, situation.peak_bytes - saved), changed, situation.settings, remedy);
  return remedy;
}

bool may_be_enough(const Remedy& remedy) { return remedy.predicted_fits.value_or(true); }

/// Pairs, where no single remedy is enough: the second is tried on what the first one leaves. At most kMostPairs.
void combine(const Situation& situation, std::vector<Remedy>& remedies) {
  constexpr size_t kMostPairs = 3;
  std::vector<Remedy> pairs;
  for (size_t i = 0; i < kCombined.size(); ++i) {
    const std::optional<Changed> one = kCombined[i](situation);
    if (!one || !saves_enough(situation, *one)) continue;
    const StepLives left{.step = situation.lives.step, .blocks = one->blocks};
    const Situation after = situation.with(left);
    for (size_t j = i + 1; j < kCombined.size(); ++j) {
      const std::optional<Changed> other = kCombined[j](after);
      if (!other || !saves_enough(after, *other)) continue;
      Changed both = *other;
      both.id = one->id + "+" + other->id;
      both.label = one->label + " + " + other->label;
      both.formula = one->formula + "; then " + other->formula;
      both.modules.insert(both.modules.begin(), one->modules.begin(), one->modules.end());
      both.how.insert(both.how.begin(), one->how.begin(), one->how.end());
      both.costs = one->costs + (one->costs.empty() || other->costs.empty() ? "" : "; ") + other->costs;
      both.at_least |= one->at_least;
      Remedy remedy = remedy_of(situation, both);
      remedy.ids = {one->id, other->id};
      if (may_be_enough(remedy)) pairs.push_back(std::move(remedy));
    }
  }
  std::stable_sort(pairs.begin(), pairs.end(),
                   [](const Remedy& a, const Remedy& b) { return a.predicted_peak_bytes < b.predicted_peak_bytes; });
  if (pairs.size() > kMostPairs) pairs.resize(kMostPairs);
  remedies.insert(remedies.end(), pairs.begin(), pairs.end());
}

}  // namespace

std::string text_of(int64_t bytes) {
  const double gib = static_cast<double>(bytes) / static_cast<double>(kGiB);
  return gib >= 1 ? fmt::format("{:.2f} GiB", gib) : fmt::format("{:.0f} MiB", gib * 1024);
}

std::vector<Remedy> predict_remedies(const Situation& situation) {
  if (situation.lives.step == 0) return {};
  std::vector<Remedy> remedies;
  bool one_is_enough = false;
  for (const Rule rule : kRules) {
    const std::optional<Changed> changed = rule(situation);
    if (!changed || !saves_enough(situation, *changed)) continue;
    remedies.push_back(remedy_of(situation, *changed));
    one_is_enough |= !changed->changes_training && !changed->at_least && may_be_enough(remedies.back());
  }
  if (!one_is_enough) combine(situation, remedies);
  std::stable_sort(remedies.begin(), remedies.end(),
                   [](const Remedy& a, const Remedy& b) { return a.predicted_peak_bytes < b.predicted_peak_bytes; });
  return remedies;
}

Remedy predict_expandable_segments(const Situation& situation) {
  Remedy remedy{.id = "expandable_segments",
                .label = "expandable_segments:True",
                .formula = "the same bytes, packed into whole pages",
                .how = {"export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"}};
  AllocatorSettings settings = situation.settings;
  settings.expandable_segments = true;
  const Changed changed{
      .id = remedy.id, .label = remedy.label, .formula = remedy.formula, .blocks = situation.lives.blocks};
  judge(situation, situation.peak_bytes, changed, settings, remedy);
  return remedy;
}

}  // namespace oomdiag
