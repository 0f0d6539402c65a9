#include "profiler/explain/predict_fixes.h"

#include <algorithm>
#include <tuple>

#include "profiler/explain/arena.h"
#include "profiler/explain/fixes.h"

namespace oomdiag {
namespace {

// What saves less than a hundredth helps nobody. Another allocator setting changes no block: it is judged by what it packs.
bool saves_enough(const StepModel& model, const ModifiedStep& step) {
  const int64_t peak = find_peak(model.blocks);
  return step.settings || (peak - find_peak(step.blocks)) * 100 >= peak;
}

bool is_python(const Lives& blocks) {
  return std::any_of(blocks.begin(), blocks.end(),
                     [](const BlockLife& block) { return block.made.source.find(".py:") != std::string_view::npos; });
}

void judge(const StepModel& model, const ModifiedStep& step, Remedy& fix) {
  // The peak may be that of another step; the difference that a fix makes to this one is taken off it.
  const int64_t saved = find_peak(model.blocks) - find_peak(step.blocks);
  fix.predicted_peak_bytes = std::max<int64_t>(0, model.peak_bytes - saved);
  fix.at_least = !model.whole || step.at_least;
  const AllocatorSettings& settings = step.settings ? *step.settings : model.settings;
  if (fix.predicted_peak_bytes > model.available_bytes) {
    fix.predicted_fits = false;
  } else if (!fix.at_least) {
    const int64_t sure_bytes = model.available_bytes - model.private_pool_cached_bytes;
    if (fits_safely(step.blocks, sure_bytes, settings)) {
      fix.predicted_fits = true;
    } else if (!gets_through(step.blocks, model.available_bytes, settings)) {
      fix.predicted_fits = false;
    }
  }
}

Remedy fix_of(const StepModel& model, const FixRow& row, const ModifiedStep& step) {
  Remedy fix{.id = std::string(row.id),
             .label = step.label.empty() ? std::string(row.label) : step.label,
             .formula = std::string(row.formula),
             .modules = step.modules,
             .costs = step.costs.empty() ? std::string(row.cost_text) : step.costs,
             .changes_training = row.changes_training && may_train(model)};
  if (!step.variant.empty()) fix.id += "_" + step.variant;
  const bool is_shell = row.lines.starts_with("export ");
  if (is_shell || is_python(model.blocks)) fix.how = step.lines.empty() ? split_lines(row.lines) : step.lines;
  judge(model, step, fix);
  return fix;
}

bool may_be_enough(const Remedy& fix) { return fix.predicted_fits.value_or(true); }

std::string joined(const std::string& a, const char* between, const std::string& b) {
  return a.empty() || b.empty() ? a + b : a + between + b;
}

Remedy pair_of(const Remedy& one, Remedy other) {
  other.ids = {one.id, other.id};
  other.id = joined(one.id, "+", other.id);
  other.label = joined(one.label, " + ", other.label);
  other.formula = joined(one.formula, "; then ", other.formula);
  other.modules.insert(other.modules.begin(), one.modules.begin(), one.modules.end());
  other.how.insert(other.how.begin(), one.how.begin(), one.how.end());
  other.costs = joined(one.costs, "; ", other.costs);
  return other;
}

/// Pairs, where no single fix is enough: the second is tried on what the first one leaves. The best kMostPairs.
std::vector<Remedy> combine(const StepModel& model) {
  constexpr size_t kMostPairs = 3;
  std::vector<Remedy> pairs;
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
      Remedy pair = pair_of(fix_of(model, rows[i], *first), fix_of(model, rows[j], *second));
      if (may_be_enough(pair)) pairs.push_back(std::move(pair));
    }
  }
  std::stable_sort(pairs.begin(), pairs.end(), is_better);
  if (pairs.size() > kMostPairs) pairs.resize(kMostPairs);
  return pairs;
}

/// What is_better goes by, lower first.
auto rank_of(const Remedy& fix) {
  const std::optional<bool> fits = fix.fits ? fix.fits : fix.predicted_fits;
  int cost = 0;
  bool cures = false;
  for (const std::string& id : fix.ids.empty() ? std::vector{fix.id} : fix.ids) {
    const FixRow* row = find_fix(id);
    if (row == nullptr) continue;
    cost = std::max(cost, static_cast<int>(row->cost));
    cures |= row->cures_growth;
  }
  const int64_t peak = fix.measured_peak_bytes.value_or(fix.predicted_peak_bytes);
  return std::tuple(!cures, fits ? (*fits ? 0 : 2) : 1, fix.changes_training, cost, fix.ids.size(), peak);
}

}  // namespace

bool is_better(const Remedy& a, const Remedy& b) { return rank_of(a) < rank_of(b); }

std::vector<Remedy> predict_remedies(const StepModel& model) {
  if (model.blocks.empty()) return {};
  std::vector<Remedy> fixes;
  bool one_is_enough = false;
  for (const FixRow& row : list_fixes()) {
    const auto step = row.predict == nullptr ? std::nullopt : row.predict(model);
    if (!step || !saves_enough(model, *step)) continue;
    fixes.push_back(fix_of(model, row, *step));
    one_is_enough |= !fixes.back().changes_training && !step->at_least && may_be_enough(fixes.back());
  }
  if (!one_is_enough) {
    for (Remedy& pair : combine(model)) fixes.push_back(std::move(pair));
  }
  std::stable_sort(fixes.begin(), fixes.end(), is_better);
  return fixes;
}

}  // namespace oomdiag
