#include "cli/experiments/fix_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "cli/experiments/experiment.h"
#include "cli/experiments/fix.h"
#include "cli/experiments/fix_runs.h"
#include "cli/process/workers.h"
#include "cli/reports/reports.h"
#include "profiler/cost/recompute_plan.h"
#include "profiler/error.h"
#include "profiler/explain/fixes/fix_rules.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/step/simulate_fits.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"

// A plan is a variant of the program (nothing, bf16 autocast, 8-bit Adam …) with so many blocks of each class checkpointed:
//
//   variant, run with ample memory ──► allocations of its step, time of each block ──► plans, peak and time of each computed
//                                                                                        │ the fastest that should fit,
//   what was run on the GPU moves what "should fit" means in its variant ◄── run ◄──────┘ and its two neighbours
//
// The end: the fastest plan that fits was run, and each faster one was run and does not, or is computed to be far too large.

namespace oomdiag {
namespace {

constexpr int kMaxRounds = 4;
constexpr std::size_t kMaxPlansTogether = 3;
constexpr double kMayBeFaster = 1.02;  ///< as fast as the fastest by estimate: worth a run
constexpr double kFarBelow = 0.9;      ///< of the available memory: it needs no run of a smaller plan beside it
constexpr double kFarTooLarge = 1.1;   ///< of the available memory: not worth a run that shows that it does not fit

bool is_of_program(const Change& change) { return change.missing.empty() && find_fix(change.id)->in_plans; }

/// One row of blocks that are alike: indices into ProgramProfile::blocks.
using BlockIndices = std::vector<std::size_t>;

bool is_alike(const ProgramProfile::Block& a, const ProgramProfile::Block& b) {
  constexpr double kAlike = 0.02;
  const auto bytes = static_cast<double>(std::max(a.saved_bytes, b.saved_bytes));
  return a.container == b.container && a.leaves == b.leaves && a.ops == b.ops &&
         std::abs(static_cast<double>(a.saved_bytes - b.saved_bytes)) <= kAlike * bytes;
}

std::vector<BlockIndices> find_block_classes(const ProgramProfile& profile) {
  std::vector<BlockIndices> classes;
  for (std::size_t i = 0; i < profile.blocks.size(); ++i) {
    const auto found = std::ranges::find_if(
        classes, [&](const BlockIndices& one) { return is_alike(profile.blocks[one.front()], profile.blocks[i]); });
    if (found == classes.end()) {
      classes.push_back({i});
    } else {
      found->push_back(i);
    }
  }
  return classes;
}

/// The program with changes to all of it, as a complete run showed it.
struct ProgramVariant {
  std::vector<Change> changes{};
  Experiment run{};
  MeasuredFix measured{};
  std::vector<BlockIndices> classes{};
  RecomputeProblem problem{};
  double steps = 1;            ///< that have as many samples as one before
  bool is_expandable = false;  ///< copied from one that was run without expandable segments
  bool is_timed = false;       ///< a plan of it that checkpoints blocks was run
  int64_t offset_bytes = 0;    ///< measured peaks lie so far above the computed ones, as the newest run showed
  int64_t fits_bytes = 0;      ///< the highest computed peak of a plan that was run and fits
  int64_t fails_bytes = std::numeric_limits<int64_t>::max();  ///< the lowest of one that does not

  const DeviceHistory* history() const {
    if (run.step == nullptr) return nullptr;
    const Explained& of = run.step->run;
    return of.report.main_device < of.history.devices.size() ? &of.history.devices[of.report.main_device] : nullptr;
  }
};

/// One choice of blocks in a variant.
struct BlockChoice {
  std::size_t variant = 0;
  RecomputePlan blocks{};
  FixPlan plan{};
};

double forward_ns(const ProgramVariant& variant, const std::string& path) {
  double sum = 0;
  for (const auto& [module, ns] : variant.run.step->forward_ns) {
    if (is_inside(module, path)) sum += ns;
  }
  return sum;
}

/// What is in use without the block's own tensors, taken from what is in use.
std::vector<int64_t> freed_by(const Allocations& blocks, const std::vector<int64_t>& in_use, const std::string& path) {
  const std::vector<std::string> paths{path};
  const std::vector<int64_t> after = list_bytes_in_use(checkpoint_paths(blocks, paths));
  std::vector<int64_t> freed(in_use.size());
  for (std::size_t i = 0; i < freed.size(); ++i) freed[i] = in_use[i] - (i < after.size() ? after[i] : after.back());
  return freed;
}

bool is_offloaded(const ProgramVariant& variant, const std::string& path) {
  return std::ranges::any_of(variant.changes, [&](const Change& change) {
    if (!change.offloads_blocks()) return false;
    return std::ranges::any_of(change.settings["chosen"], [&](const nlohmann::json& one) { return one == path; });
  });
}

void add_blocks(ProgramVariant& variant, const ProgramProfile& profile) {
  const DeviceHistory* const history = variant.history();
  if (history == nullptr) return;
  const Allocations& step = history->step_allocations.blocks;
  std::vector<int64_t> in_use = list_bytes_in_use(step);
  for (BlockIndices one : find_block_classes(profile)) {
    std::erase_if(one, [&](std::size_t i) { return is_offloaded(variant, profile.blocks[i].path); });
    BlockClass made;
    for (const std::size_t i : one) {
      made.block_ns = std::max(made.block_ns, forward_ns(variant, profile.blocks[i].path));
      made.freed.push_back(freed_by(step, in_use, profile.blocks[i].path));
    }
    if (made.block_ns == 0) continue;  // its cost is not known
    variant.classes.push_back(one);
    variant.problem.classes.push_back(std::move(made));
  }
  // The highest peak may be that of another step.
  const int64_t above = history->peak.allocated_bytes - std::ranges::max(in_use);
  for (int64_t& bytes : in_use) bytes += above;
  variant.problem.bytes = std::move(in_use);
}

class PlanSearch {
 public:
  PlanSearch(const Target& target, Experiments& experiments, const FixRuns::OnDone& on_done)
      : runs_(target, experiments, on_done) {}

  FoundPlans run();

 private:
  void add_variant(std::vector<Change> changes, Experiment experiment);
  void add_as_it_is();
  void take_proof(const BlockChoice& choice);
  void correct_times(const BlockChoice& proved);
  void add_expandable(std::size_t variant);
  std::optional<Change> offload_hidden() const;
  void run_variants(const std::vector<std::vector<Change>>& variants);
  std::vector<std::vector<Change>> list_variants() const;
  std::vector<std::vector<Change>> list_combinations(bool same_sums) const;
  double share_of_time(const std::vector<Change>& changes) const;
  void add_choices(std::size_t variant);
  void add_choice(std::size_t variant, const RecomputePlan& blocks);
  std::vector<std::string> paths_of(const BlockChoice& choice) const;
  std::optional<int64_t> time_of_choice(const BlockChoice& choice) const;
  bool should_fit(const BlockChoice& choice) const;
  std::optional<std::size_t> find_fastest(bool same_sums) const;
  std::optional<std::size_t> find_neighbour(std::size_t of, bool faster) const;
  std::vector<std::size_t> list_next(bool same_sums) const;
  void prove(const std::vector<std::size_t>& which);
  void prove_fastest(bool same_sums);
  std::optional<double> gap_of(const BlockChoice& choice) const;
  FoundPlans found() const;

  FixRuns runs_;
  std::vector<ProgramVariant> variants_;
  std::vector<BlockChoice> choices_;
};

void PlanSearch::add_variant(std::vector<Change> changes, Experiment experiment) {
  ProgramVariant variant{.changes = std::move(changes), .run = std::move(experiment)};
  variant.measured.changes = variant.changes;
  runs_.take(variant.measured, variant.run, /*on_gpu=*/false);
  if (!variant.measured.unproved.empty() || !variant.measured.measured_peak_bytes) return;
  variant.steps = variant.measured.steps_for_one(runs_.before().step, runs_.target().batch);
  variant.problem.step_ns = variant.steps * static_cast<double>(variant.measured.step.time_ns.value_or(0));
  const bool has_own = std::ranges::any_of(
      variant.changes, [](const Change& one) { return one.group == "checkpoint" && !one.offloads_blocks(); });
  if (!has_own) add_blocks(variant, runs_.profile());
  for (BlockClass& one : variant.problem.classes) one.block_ns *= variant.steps;
  if (variant.problem.bytes.empty()) variant.problem.bytes = {*variant.measured.measured_peak_bytes};
  variants_.push_back(std::move(variant));
  add_choices(variants_.size() - 1);
}

/// The program as it is was run on the GPU already.
void PlanSearch::add_as_it_is() {
  add_variant({}, runs_.whole_run());
  if (choices_.empty()) return;
  BlockChoice& choice = choices_.front();
  choice.plan.on_gpu = true;
  choice.plan.fix.fits = runs_.before().outcome == "ok";
  take_proof(choice);
}

void PlanSearch::run_variants(const std::vector<std::vector<Change>>& variants) {
  std::vector<ExperimentRequest> requests;
  for (const std::vector<Change>& changes : variants) {
    requests.push_back(runs_.request(changes, FixRuns::Place::with_ample_memory));
    requests.back().keeps_step = true;
  }
  runs_.make(requests, [&](std::size_t i, const Experiment& experiment) { add_variant(variants[i], experiment); });
}

std::vector<std::vector<Change>> PlanSearch::list_variants() const {
  std::vector<std::vector<Change>> variants;
  for (const Change& change : list_changes(runs_.target(), runs_.profile(), runs_.whole(), runs_.before())) {
    if (is_of_program(change)) variants.push_back({change});
  }
  if (auto change = offload_hidden()) variants.push_back({std::move(*change)});
  return variants;
}

/// Of the blocks that keep most, as many as the bus can copy while the others compute: one of so many that the forward of these takes as
/// long as its copy. The last ones stay, as backward comes to them at once. Nothing where the bus is too slow for any.
std::optional<Change> PlanSearch::offload_hidden() const {
  const ProgramVariant& plain = variants_.front();
  const int64_t bus = runs_.target().device.gpus.front().gpu.rates.bus_bytes;
  if (bus == 0) return std::nullopt;
  const auto saved_bytes = [&](const BlockIndices& blocks) {
    int64_t bytes = 0;
    for (const std::size_t i : blocks) bytes += runs_.profile().blocks[i].saved_bytes;
    return bytes;
  };
  const auto most = std::ranges::max_element(plain.classes, {}, saved_bytes);
  if (most == plain.classes.end() || saved_bytes(*most) == 0) return std::nullopt;
  const double block_ns = plain.problem.classes[static_cast<std::size_t>(most - plain.classes.begin())].block_ns;
  const double block_bytes = static_cast<double>(saved_bytes(*most)) / static_cast<double>(most->size());
  const double copy_ns = block_bytes / static_cast<double>(bus) * 1e9;
  const auto stride = static_cast<std::size_t>(std::max(1.0, std::ceil(copy_ns / block_ns)));
  std::vector<std::size_t> chosen;
  for (std::size_t k = 0; k + stride < most->size(); k += stride) chosen.push_back((*most)[k]);
  return chosen.empty() ? std::nullopt : std::optional(offload_chosen(runs_.profile(), *most, chosen));
}

/// Of the time of the program as it is, by the product of what each change alone makes of it.
double PlanSearch::share_of_time(const std::vector<Change>& changes) const {
  double share = 1;
  for (const Change& change : changes) {
    const auto alone = std::ranges::find_if(variants_, [&](const ProgramVariant& one) {
      return one.changes.size() == 1 && one.changes.front().id == change.id;
    });
    if (alone != variants_.end()) share *= alone->problem.step_ns / variants_.front().problem.step_ns;
  }
  return share;
}

/// Changes together that could be faster than the fastest plan that should fit; where none should, those with the lowest peak.
std::vector<std::vector<Change>> PlanSearch::list_combinations(bool same_sums) const {
  std::vector<MeasuredFix> alone;
  for (const ProgramVariant& one : variants_) {
    const bool counts =
        one.changes.size() == 1 && !one.is_expandable && !(same_sums && one.measured.changes_numerics());
    if (counts) alone.push_back(one.measured);
  }
  Before any_peak = runs_.before();  // blocks may be checkpointed besides
  any_peak.available_bytes = any_peak.allocated_bytes;
  std::vector<std::vector<Change>> together = combine(alone, any_peak);
  const auto fastest = find_fastest(same_sums);
  const double least = fastest ? static_cast<double>(*time_of_choice(choices_[*fastest])) : 0;
  std::erase_if(together, [&](const std::vector<Change>& changes) {
    const bool was_run = std::ranges::any_of(variants_, [&](const ProgramVariant& one) {
      return std::ranges::equal(one.changes, changes, {}, &Change::id, &Change::id);
    });
    const bool is_slower = fastest && share_of_time(changes) * variants_.front().problem.step_ns > kMayBeFaster * least;
    return was_run || is_slower || !std::ranges::all_of(changes, is_of_program);
  });
  std::ranges::stable_sort(together, {}, [&](const std::vector<Change>& changes) { return share_of_time(changes); });
  if (together.size() > kMaxPlansTogether) together.resize(kMaxPlansTogether);
  return together;
}

void PlanSearch::add_choice(std::size_t variant, const RecomputePlan& blocks) {
  const auto is_known = [&](const BlockChoice& one) {
    return one.variant == variant && one.blocks.counts == blocks.counts;
  };
  if (std::ranges::any_of(choices_, is_known)) return;
  BlockChoice choice{.variant = variant, .blocks = blocks};
  const ProgramVariant& of = variants_[variant];
  std::vector<std::size_t> chosen;
  for (std::size_t i = 0; i < blocks.counts.size(); ++i) {
    chosen.insert(chosen.end(), of.classes[i].begin(),
                  of.classes[i].begin() + static_cast<std::ptrdiff_t>(blocks.counts[i]));
  }
  choice.plan.predicted_peak_bytes = blocks.peak_bytes;
  if (blocks.step_ns > 0) choice.plan.predicted_ns = std::llround(blocks.step_ns);
  if (chosen.empty()) {
    choice.plan.fix = of.measured;
    choice.plan.was_run = of.measured.measured_peak_bytes.has_value();
  } else {
    choice.plan.fix.changes = of.changes;
    choice.plan.fix.changes.push_back(checkpoint_chosen(runs_.profile(), std::move(chosen)));
  }
  choices_.push_back(std::move(choice));
}

void PlanSearch::add_choices(std::size_t variant) {
  const RecomputeProblem& problem = variants_[variant].problem;
  for (const RecomputePlan& blocks : list_pareto_front(problem)) add_choice(variant, blocks);
  if (const auto cheapest = find_cheapest_plan(problem, runs_.before().available_bytes)) add_choice(variant, *cheapest);
}

std::vector<std::string> PlanSearch::paths_of(const BlockChoice& choice) const {
  std::vector<std::string> paths;
  for (std::size_t i = 0; i < choice.blocks.counts.size(); ++i) {
    for (std::size_t k = 0; k < choice.blocks.counts[i]; ++k) {
      paths.push_back(runs_.profile().blocks[variants_[choice.variant].classes[i][k]].path);
    }
  }
  return paths;
}

std::optional<int64_t> PlanSearch::time_of_choice(const BlockChoice& choice) const {
  return time_of(choice.plan, runs_.before(), runs_.target().batch);
}

/// Whether it fits, by its run; else by the runs of its variant; else by its bytes and PyTorch's allocator.
bool PlanSearch::should_fit(const BlockChoice& choice) const {
  if (choice.plan.on_gpu) return choice.plan.is_proved();
  const ProgramVariant& variant = variants_[choice.variant];
  if (choice.blocks.peak_bytes >= variant.fails_bytes) return false;
  if (choice.blocks.peak_bytes <= variant.fits_bytes) return true;
  const int64_t available = runs_.before().available_bytes - std::max<int64_t>(0, variant.offset_bytes);
  if (choice.blocks.peak_bytes > available) return false;
  const DeviceHistory* const history = variant.history();
  if (history == nullptr || choice.blocks.counts.empty()) return true;
  AllocatorSettings settings = variant.run.step->run.history.settings;
  settings.expandable_segments |= variant.is_expandable;
  return simulate_fits(checkpoint_paths(history->step_allocations.blocks, paths_of(choice)), available, settings);
}

/// Of the plans that should fit or do; `same_sums`: of those that compute the same numbers.
std::optional<std::size_t> PlanSearch::find_fastest(bool same_sums) const {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    if (same_sums && choices_[i].plan.fix.changes_numerics()) continue;
    const auto ns = time_of_choice(choices_[i]);
    if (!ns || (best && *ns >= *time_of_choice(choices_[*best])) || !should_fit(choices_[i])) continue;
    best = i;
  }
  return best;
}

/// The next plan of the same variant that is faster or slower.
std::optional<std::size_t> PlanSearch::find_neighbour(std::size_t of, bool faster) const {
  std::optional<std::size_t> next;
  const auto ns = [&](std::size_t i) { return choices_[i].blocks.step_ns; };
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    if (choices_[i].variant != choices_[of].variant || (faster ? ns(i) >= ns(of) : ns(i) <= ns(of))) continue;
    if (!next || (faster ? ns(i) > ns(*next) : ns(i) < ns(*next))) next = i;
  }
  return next;
}

/// What to run next: empty where the fastest is known.
std::vector<std::size_t> PlanSearch::list_next(bool same_sums) const {
  const auto fastest = find_fastest(same_sums);
  if (!fastest) return {};
  std::vector<std::size_t> next;
  const bool is_proved = choices_[*fastest].plan.on_gpu;
  if (!is_proved) next.push_back(*fastest);
  const auto available = static_cast<double>(runs_.before().available_bytes);
  const auto peak = [&](std::size_t i) { return static_cast<double>(choices_[i].blocks.peak_bytes); };
  const auto is_open = [&](const std::optional<std::size_t>& i) { return i && !choices_[*i].plan.on_gpu; };
  const auto faster = find_neighbour(*fastest, true), slower = find_neighbour(*fastest, false);
  if (is_open(faster) && peak(*faster) <= kFarTooLarge * available) next.push_back(*faster);
  if (!is_proved && is_open(slower) && peak(*fastest) > kFarBelow * available) next.push_back(*slower);
  return next;
}

void PlanSearch::prove(const std::vector<std::size_t>& which) {
  std::vector<ExperimentRequest> requests;
  for (const std::size_t i : which)
    requests.push_back(runs_.request(choices_[i].plan.fix.changes, FixRuns::Place::gpu));
  runs_.make(requests, [&](std::size_t k, const Experiment& experiment) {
    BlockChoice& choice = choices_[which[k]];
    runs_.take(choice.plan.fix, experiment, /*on_gpu=*/true);
    choice.plan.was_run = choice.plan.on_gpu = true;
    take_proof(choice);
  });
  for (const std::size_t i : which) {
    const bool has_bytes = choices_[i].blocks.peak_bytes <= runs_.before().available_bytes;
    if (has_bytes && !choices_[i].plan.is_proved()) add_expandable(choices_[i].variant);
  }
}

/// A plan whose bytes fit ran out for want of a free block of its size: the same plans without fragmentation.
void PlanSearch::add_expandable(std::size_t variant) {
  const auto is_added = [&](const ProgramVariant& one) {
    return one.is_expandable && one.changes.size() == variants_[variant].changes.size() + 1 &&
           std::ranges::equal(one.changes.begin(), one.changes.end() - 1, variants_[variant].changes.begin(),
                              variants_[variant].changes.end(), {}, &Change::id, &Change::id);
  };
  if (variants_[variant].is_expandable || std::ranges::any_of(variants_, is_added)) return;
  ProgramVariant copy = variants_[variant];
  copy.is_expandable = true;
  copy.changes.push_back(expandable_segments());
  copy.measured = {.changes = copy.changes};
  copy.offset_bytes = copy.fits_bytes = 0;
  copy.fails_bytes = std::numeric_limits<int64_t>::max();
  variants_.push_back(std::move(copy));
  add_choices(variants_.size() - 1);
}

/// What a run on the GPU says of the other plans of its variant.
void PlanSearch::take_proof(const BlockChoice& choice) {
  ProgramVariant& variant = variants_[choice.variant];
  if (!choice.plan.is_proved()) {
    variant.fails_bytes = std::min(variant.fails_bytes, choice.blocks.peak_bytes);
    return;
  }
  variant.fits_bytes = std::max(variant.fits_bytes, choice.blocks.peak_bytes);
  variant.offset_bytes = *choice.plan.fix.measured_peak_bytes - choice.blocks.peak_bytes;
  correct_times(choice);
}

/// A checkpoint runs its forward again only up to the last tensor that backward needs: of its time so much as this run shows, also in
/// variants of which no such plan was run.
void PlanSearch::correct_times(const BlockChoice& proved) {
  ProgramVariant& variant = variants_[proved.variant];
  const double computed = proved.blocks.step_ns - variant.problem.step_ns;
  if (computed <= 0 || !proved.plan.fix.step.time_ns) return;
  variant.is_timed = true;
  const double share = (static_cast<double>(*time_of_choice(proved)) - variant.problem.step_ns) / computed;
  for (BlockChoice& one : choices_) {
    const ProgramVariant& of = variants_[one.variant];
    if (one.plan.was_run || (of.is_timed && one.variant != proved.variant)) continue;
    const double without = of.problem.step_ns;
    one.plan.predicted_ns = std::llround(without + share * (one.blocks.step_ns - without));
  }
}

void PlanSearch::prove_fastest(bool same_sums) {
  for (int round = 0; round < kMaxRounds; ++round) {
    const std::vector<std::size_t> next = list_next(same_sums);
    if (next.empty()) return;
    prove(next);
  }
}

/// To the bound of the plans that could fit: within the available memory, and below those of the variant that ran out.
std::optional<double> PlanSearch::gap_of(const BlockChoice& choice) const {
  const ProgramVariant& variant = variants_[choice.variant];
  const auto least = lower_bound_ns(variant.problem, std::min(runs_.before().available_bytes, variant.fails_bytes - 1));
  if (!least || choice.blocks.step_ns <= 0) return std::nullopt;
  return std::max(0.0, choice.blocks.step_ns / *least - 1);
}

FoundPlans PlanSearch::found() const {
  FoundPlans found{.before = runs_.before(), .batch = runs_.target().batch};
  const ReportOfDevice* const device = main_device_of(runs_.whole());
  if (!found.batch && device != nullptr && device->batch) found.batch = device->batch->batch;
  if (runs_.profile().blocks.empty()) found.no_blocks = "the model has no list of blocks";
  const auto ns = [&](const BlockChoice& one) { return time_of_choice(one).value_or(0); };
  std::vector<const BlockChoice*> order;
  for (const BlockChoice& one : choices_) order.push_back(&one);
  std::ranges::stable_sort(order, {}, [&](const BlockChoice* one) { return ns(*one); });
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const BlockChoice* const one : order) {
    const bool is_on_front = one->plan.peak_bytes() < least;
    least = std::min(least, one->plan.peak_bytes());
    if (!is_on_front && !one->plan.was_run) continue;
    const bool same = !one->plan.fix.changes_numerics();
    if (one->plan.is_proved() && !found.fastest) {
      found.fastest = found.plans.size();
      found.gap = gap_of(*one);
    }
    if (one->plan.is_proved() && same && !found.same_sums) found.same_sums = found.plans.size();
    found.plans.push_back(one->plan);
  }
  return found;
}

FoundPlans PlanSearch::run() {
  const auto begin = std::chrono::steady_clock::now();
  int interrupted_by = 0;
  runs_.profile_the_complete_run(/*keeps_step=*/true);
  if (!runs_.before().is_whole || runs_.before().grows) {
    throw Error(ErrorKind::input, "no complete step of the program could be seen, or it grows from step to step",
                "see what is behind it: oomdiag fix -- PROGRAM");
  }
  try {
    add_as_it_is();
    run_variants(list_variants());
    for (const bool same_sums : {false, true}) {
      run_variants(list_combinations(same_sums));
      prove_fastest(same_sums);
    }
  } catch (const Interrupted& interrupted) {
    interrupted_by = interrupted.signal;
  }
  FoundPlans all = found();
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  all.runs = runs_.experiments().count();
  all.seconds = time.count();
  all.interrupted_by = interrupted_by;
  return all;
}

}  // namespace

std::optional<int64_t> time_of(const FixPlan& plan, const Before& before, std::optional<int64_t> batch) {
  if (!plan.fix.step.time_ns) return plan.predicted_ns;
  return std::llround(plan.fix.steps_for_one(before.step, batch) * static_cast<double>(*plan.fix.step.time_ns));
}

FoundPlans search_plans(const Target& target, Experiments& experiments,
                        const std::function<void(std::size_t, std::size_t)>& on_done) {
  return PlanSearch(target, experiments, on_done).run();
}

}  // namespace oomdiag
