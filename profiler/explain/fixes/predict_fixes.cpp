#include "profiler/explain/fixes/predict_fixes.h"

#include <algorithm>
#include <tuple>

#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/framework_lines.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/step/simulate_fits.h"
#include "profiler/explain/step/step_model.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"

namespace oomdiag {
namespace {

// What saves less than a hundredth helps nobody. Another allocator setting changes no block: it is judged by what it packs.
bool saves_enough(const StepModel& model, const ModifiedStep& step) {
  const int64_t peak = find_peak(model.blocks);
  return step.settings || (peak - find_peak(step.blocks)) * 100 >= peak;
}

bool is_python(const Allocations& blocks) {
  return std::any_of(blocks.begin(), blocks.end(), [](const StepAllocation& block) {
    return block.made.source.find(".py:") != std::string_view::npos;
  });
}

// "batch_6012" is a batch of 6012; of the others the framework's is half of it.
std::optional<int64_t> batch_with(const StepModel& model, const std::string& id) {
  constexpr std::string_view kBatch = "batch_";
  if (id.starts_with(kBatch)) return std::stoll(id.substr(kBatch.size()));
  return model.batch ? std::optional(*model.batch / 2) : std::nullopt;
}

/// The lines that a program of the framework gets the fix by, else `lines`.
std::vector<std::string> lines_with(const StepModel& model, const std::string& id, std::vector<std::string> lines) {
  return lines_in_framework(model.framework, id, batch_with(model, id)).value_or(std::move(lines));
}

void judge(const StepModel& model, const ModifiedStep& step, Fix& fix) {
  // The peak may be that of another step; the difference that a fix makes to this one is taken off it.
  const int64_t saved = find_peak(model.blocks) - find_peak(step.blocks);
  fix.predicted_peak_bytes = std::max(step.floor_bytes, model.peak_bytes - saved);
  fix.at_least = !model.whole || step.at_least;
  const AllocatorSettings& settings = step.settings ? *step.settings : model.settings;
  if (fix.predicted_peak_bytes > model.available_bytes) {
    fix.predicted_fits = false;
  } else if (!fix.at_least) {
    const int64_t sure_bytes = model.available_bytes - model.private_pool_cached_bytes;
    if (simulate_fits_with_margin(step.blocks, sure_bytes, settings)) {
      fix.predicted_fits = true;
    } else if (!simulate_fits(step.blocks, model.available_bytes, settings)) {
      fix.predicted_fits = false;
    }
  }
}

// Of what earlier steps left behind, the part that is left with the fix: as much less is left by each step.
double kept_share(const Allocations& before, const Allocations& after) {
  const auto left = [](const Allocations& blocks) {
    int64_t bytes = 0;
    for (const StepAllocation& block : blocks) {
      const bool is_left = !block.is_of_step() && block.phase != Phase::setup && !traits_of(block.category).of_model;
      bytes += is_left ? block.bytes : 0;
    }
    return static_cast<double>(bytes);
  };
  return left(before) > 0 ? left(after) / left(before) : 1;
}

// In a leak every step adds, whatever a step takes itself: without the growth the steps are those that got through before,
// and with any other fix it fails later.
void judge_leak(const StepModel& model, const FixRow& row, const ModifiedStep& step, Fix& fix) {
  if (!model.leaks) return;
  const int64_t left = model.available_bytes - model.private_pool_cached_bytes - fix.predicted_peak_bytes;
  if (row.cures_growth) {
    fix.at_least = false;
    fix.predicted_fits = left >= 0;
    return;
  }
  fix.predicted_fits = false;
  const double each = static_cast<double>(model.grown_per_step) * kept_share(model.blocks, step.blocks) *
                      static_cast<double>(step.passes);
  if (left <= 0 || each < 1) return;
  const double steps = std::min(1e9, static_cast<double>(left) / each);
  if (steps < 2) return;  // no later than without it
  fix.postpones_to_step = model.last_step + static_cast<uint32_t>(steps);
}

Fix fix_of(const StepModel& model, const FixRow& row, const ModifiedStep& step) {
  Fix fix{.id = std::string(row.id),
          .label = step.label.empty() ? std::string(row.label) : step.label,
          .formula = std::string(row.formula),
          .modules = step.modules,
          .costs = step.costs.empty() ? std::string(row.cost_text) : step.costs,
          .changes_training = row.changes_training && may_train(model)};
  if (!step.variant.empty()) fix.id += "_" + step.variant;
  const bool is_shell = row.lines.starts_with("export ");
  if (is_shell || is_python(model.blocks))
    fix.how = lines_with(model, fix.id, step.lines.empty() ? split_lines(row.lines) : step.lines);
  judge(model, step, fix);
  judge_leak(model, row, step, fix);
  fix.saves_little = !fix.predicted_fits && fix.predicted_peak_bytes > model.peak_bytes / 4 * 3;
  return fix;
}

bool may_be_enough(const Fix& fix) { return fix.predicted_fits.value_or(true); }

std::string joined(const std::string& a, const char* between, const std::string& b) {
  return a.empty() || b.empty() ? a + b : a + between + b;
}

Fix pair_of(const Fix& one, Fix other) {
  other.ids = {one.id, other.id};
  other.id = joined(one.id, "+", other.id);
  other.label = joined(one.label, " + ", other.label);
  other.formula = joined(one.formula, "; then ", other.formula);
  other.modules.insert(other.modules.begin(), one.modules.begin(), one.modules.end());
  other.how.insert(other.how.begin(), one.how.begin(), one.how.end());
  other.costs = joined(one.costs, "; ", other.costs);
  return other;
}

/// Pairs, where no single fix is enough: the second is tried on what the first one leaves. The best kMaxPairs.
std::vector<Fix> combine(const StepModel& model) {
  constexpr size_t kMaxPairs = 3;
  std::vector<Fix> pairs;
  const std::span<const FixRow> rows = list_fixes();
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto first = rows[i].combines ? rows[i].predict(model) : std::nullopt;
    if (!first || !saves_enough(model, *first)) continue;
    StepModel after = model;
    after.blocks = first->blocks;
    for (size_t j = i + 1; j < rows.size(); ++j) {
      const bool apart = rows[j].combines && rows[j].group != rows[i].group;
      auto second = apart ? rows[j].predict(after) : std::nullopt;
      if (!second || !saves_enough(after, *second)) continue;
      second->at_least |= first->at_least;
      Fix pair = pair_of(fix_of(model, rows[i], *first), fix_of(model, rows[j], *second));
      if (may_be_enough(pair)) pairs.push_back(std::move(pair));
    }
  }
  std::stable_sort(pairs.begin(), pairs.end(), is_better);
  if (pairs.size() > kMaxPairs) pairs.resize(kMaxPairs);
  return pairs;
}

/// What is_better goes by, lower first.
auto rank_of(const Fix& fix) {
  const std::optional<bool> fits = fix.fits ? fix.fits : fix.predicted_fits;
  int cost = 0;
  int cures = 2;  // 0: what is behind the cause; 1: growth
  for (const std::string& id : fix.ids.empty() ? std::vector{fix.id} : fix.ids) {
    const FixRow* row = find_fix(id);
    if (row == nullptr) continue;
    cost = std::max(cost, static_cast<int>(row->cost));
    cures = std::min(cures, row->cures_reason ? 0 : row->cures_growth ? 1 : 2);
  }
  // Where only what it frees is known there is no peak to compare.
  const int64_t peak = fix.measured_peak_bytes.value_or(fix.frees_bytes ? 0 : fix.predicted_peak_bytes);
  const int64_t postpones = -int64_t{fix.postpones_to_step.value_or(0)};
  const bool proved = fix.fits == true;  // by a run: nothing that is only computed goes before it
  return std::tuple(!proved, cures, postpones, fits ? (*fits ? 0 : 2) : 1, fix.saves_little, fix.changes_training, cost,
                    fix.ids.size(), peak);
}

}  // namespace

namespace {

/// What was predicted of `other`, which `fix` replaces.
void take_prediction(const Fix& other, Fix& fix) {
  fix.predicted_peak_bytes = other.predicted_peak_bytes;
  fix.at_least = other.at_least;
  fix.frees_bytes.reset();
  fix.predicted_fits = other.predicted_fits;
}

/// Whether it works on fewer rows, or shorter ones, at a time.
bool takes_fewer_rows(const Fix& fix) {
  const FixRow* row = find_fix(fix.id);
  return fix.ids.size() < 2 && row != nullptr && (row->group == "batch" || row->group == "sequence");
}

/// Without what a reason holds. Both are rounded differently: where nothing would be left, the parameters are.
int64_t peak_without(const Reason& reason, const StepModel& model) {
  if (reason.bytes < model.peak_bytes) return model.peak_bytes - reason.bytes;
  int64_t parameters = 0;
  for (const StepAllocation& block : model.blocks)
    parameters += block.category == Category::parameter ? block.bytes : 0;
  return parameters;
}

}  // namespace

void replace_same(Fix& cure, std::vector<Fix>& fixes, bool of_leak) {
  const FixRow* row = find_fix(cure.id);
  const auto same =
      std::ranges::find_if(fixes, [&](const Fix& one) { return row != nullptr && one.id == row->same_as; });
  if (same == fixes.end()) return;
  // In a leak the prediction is of one step, and the cure ends what each of them leaves.
  const bool may_fit = same->predicted_fits.value_or(true);
  if (!may_fit && !of_leak) return;
  if (may_fit) take_prediction(*same, cure);
  if (cure.how.empty()) cure.how = same->how;
  fixes.erase(same);
}

void add_cure(const Reason& reason, const StepModel& model, std::vector<Fix>& fixes) {
  const FixRow* row = find_fix(reason.fix);
  if (row == nullptr || (row->group == "segments" && model.settings.expandable_segments)) return;
  Fix fix{.id = std::string(row->id),
          .label = std::string(row->label),
          .costs = std::string(row->cost_text),
          .changes_training = row->changes_training,
          .predicted_peak_bytes = peak_without(reason, model),
          .at_least = reason.bytes == 0};
  if (reason.bytes > 0) fix.frees_bytes = model.peak_bytes - fix.predicted_peak_bytes;
  // What ends growth is judged as that, whatever it is called.
  const auto stop = std::ranges::find(fixes, std::string("stop_growth"), &Fix::id);
  const bool ends_growth = model.leaks && reason.bytes * 10 >= model.grown_bytes * 9;
  if (stop != fixes.end() && (row->group == "growth" || row->cures_growth || ends_growth)) {
    if (!stop->at_least) take_prediction(*stop, fix);
    fix.predicted_fits = stop->predicted_fits;
    if (row->cures_growth) fix.label = stop->label;
    fixes.erase(stop);
  }
  const bool is_shell = row->lines.starts_with("export ");
  const bool has_lines = model.blocks.empty() || is_shell || is_python(model.blocks);
  if (has_lines) fix.how = reason.how;
  replace_same(fix, fixes, model.leaks);
  if (reason.of_any_batch) std::erase_if(fixes, takes_fewer_rows);
  if (reason.piles_up) {
    for (Fix& other : fixes) {
      if (other.predicted_fits == true) other.predicted_fits.reset();
    }
  }
  if (has_lines) fix.how = lines_with(model, fix.id, fix.how.empty() ? split_lines(row->lines) : fix.how);
  fixes.insert(fixes.begin(), std::move(fix));
  std::stable_sort(fixes.begin(), fixes.end(), is_better);
}

bool is_better(const Fix& a, const Fix& b) { return rank_of(a) < rank_of(b); }

std::vector<Fix> predict_fixes(const StepModel& model) {
  if (model.blocks.empty()) return {};
  std::vector<Fix> fixes;
  bool one_is_enough = false;
  for (const FixRow& row : list_fixes()) {
    const auto step = row.predict == nullptr ? std::nullopt : row.predict(model);
    if (!step || !saves_enough(model, *step)) continue;
    fixes.push_back(fix_of(model, row, *step));
    one_is_enough |= !fixes.back().changes_training && !step->at_least && may_be_enough(fixes.back());
  }
  if (!one_is_enough && !model.leaks) {
    for (Fix& pair : combine(model)) fixes.push_back(std::move(pair));
  }
  std::stable_sort(fixes.begin(), fixes.end(), is_better);

  return fixes;
}

}  // namespace oomdiag
