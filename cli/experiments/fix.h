#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/device/device.h"
#include "cli/experiments/experiment.h"
#include "cli/launch/ranks.h"
#include "cli/process/launcher.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/reason.h"
#include "profiler/report/report.h"

// oomdiag fix: fixes, each applied to the unchanged program and run. Values here, the stages in fix_*.cpp.
namespace oomdiag {

/// The run that is to be fixed.
struct RecordedRun {
  std::string place{};   ///< where it ran out of memory, "forward, step 41"; empty: it did not
  uint32_t step = 0;     ///< that each run with a fix has to reach, see step_to_reach()
  bool is_same = false;  ///< the GPU and its memory are as they were: the program has to run out again
};

/// A program that is to be helped, and how it is run.
struct Target {
  std::vector<std::string> program{};  ///< may hold {batch}
  VirtualHost device{};                ///< on which it is to fit; of a real GPU the virtual one of its name
  bool proves_on_real = false;         ///< a run without more memory is made on the real GPU
  Environment environment{};
  std::optional<SingleRank> rank{};  ///< of a job whose others are not there
  std::optional<RecordedRun> recorded{};
  std::optional<int64_t> batch{};  ///< of {batch}
  bool takes_amp = false;          ///< one of the samples, with --amp
  bool accumulates = false;        ///< one of the samples, with --accumulate
};

/// What look.py reported; nothing where it cannot be read.
ProgramProfile read_profile(const std::vector<nlohmann::json>& reported);

/// Whether the outputs of a call have the shapes of another's. What only one of them has (a cache of keys and values that
/// a checkpoint must do without) does not count.
bool same_shapes(const nlohmann::json& a, const nlohmann::json& b);

/// Whether each process of a job gave outputs of the same shapes in both runs, as far as both came.
bool same_outputs(const ProgramProfile::Outputs& a, const ProgramProfile::Outputs& b);

/// One change to the program.
struct Change {
  std::string id;     ///< of the fix, as in the report
  std::string group;  ///< of several in a group only one can be
  std::string label;
  FixCost cost = FixCost::none;
  bool changes_numerics = false;
  double extra_forward = 0;                 ///< share of the modules of forward that run again
  std::optional<int64_t> recomputed_ops{};  ///< of autograd that run again in each backward; nullopt = not seen
  nlohmann::json settings{};                ///< of the injected module; null = not injected
  Environment environment{};                ///< that the program is run with
  std::vector<std::string> added{};         ///< arguments behind the program's own
  std::optional<int64_t> batch{};           ///< for {batch}
  std::vector<std::string> lines{};         ///< that a user writes; those of injected ones report theirs
  std::optional<int64_t> predicted_peak_bytes{};
  bool predicted_at_least = false;  ///< that is a lower bound
  std::string missing{};            ///< what it needs and is not there: it is not run
  bool cures = false;               ///< what is behind the failure: it is run on the GPU first

  bool changes_batch() const { return group == "batch"; }
  bool offloads_blocks() const { return id == "offload_blocks"; }
};
/// The change that the row of `id` describes (profiler/explain/fixes/fixes.h). How it is made is for the caller.
Change change_of(std::string id);

/// What a step of a run does and takes; the time is modelled (profiler/cost/time_model.h).
struct StepCost {
  std::optional<int64_t> flops{}, bus_bytes{}, time_ns{};

  bool operator==(const StepCost&) const = default;
};
StepCost cost_of_step(const Report& report);

struct Before;

/// One or several changes together, and what came of them.
struct MeasuredFix {
  std::vector<Change> changes;
  std::optional<int64_t> measured_peak_bytes{}, measured_reserved_bytes{};
  StepCost step{};
  bool fits = false;                 ///< it passed on the GPU
  bool still_grows = false;          ///< from step to step: a longer run would fail all the same
  std::string unproved{};            ///< why there is no measured figure
  std::vector<std::string> lines{};  ///< that a user writes

  std::string label() const;
  bool helps() const { return fits && !still_grows; }
  int cost() const;
  bool changes_numerics() const;
  double extra_forward() const;
  std::optional<int64_t> recomputed_ops() const;
  std::optional<int64_t> predicted_peak_bytes() const;  ///< of a single change
  bool predicted_at_least() const;
  /// Whether it is the cure of the reason, by whichever row.
  bool cures(const Before& before) const;
  /// How many steps take the samples of one step before: a smaller batch has more.
  double steps_for_one(const StepCost& before, std::optional<int64_t> batch) const;
  /// The time of these steps over that of the one before.
  std::optional<double> slowdown(const StepCost& before, std::optional<int64_t> batch) const;
};

/// The run as it is.
struct Before {
  std::string outcome{}, place{};
  std::string cause{};         ///< of the failure
  int64_t required_bytes = 0;  ///< of GPU: what the whole run allocated at most, and what is outside
  int64_t allocated_bytes = 0, reserved_bytes = 0;  ///< peaks of the whole run
  int64_t available_bytes = 0;                      ///< what PyTorch may take of the GPU
  StepCost step{};                                  ///< of the whole run
  bool is_whole = true;                             ///< what it needs was seen, not only what it had when it failed
  uint32_t stopped_at_step = 0;  ///< that run was ended in this step, its peak being steady; 0 = it ended by itself
  bool grows = false;            ///< from step to step
  std::vector<std::string> code_changes{};  ///< what only a change to the code can cure: the line that keeps
  std::optional<Reason> reason{};           ///< what of the program is behind the failure
  std::vector<std::string> stack{};         ///< calls that led to it, "train.py:31 in forward", innermost first
  uint32_t failing_step = 0;                ///< in which it ran out of memory
};

struct Fixed {
  Before before;
  std::vector<MeasuredFix> fixes;  ///< proved ones that help, then the others by their peak, then unproved ones
  std::size_t runs = 0;
  double seconds = 0;
  int interrupted_by = 0;         ///< signal; what was measured by then stands
  std::optional<Report> whole{};  ///< on the complete run, where the program runs out and there was one

  bool helped() const;
};

/// What might help, cures first, then the cheapest. `whole` is the report on the whole run, its fixes judged by the GPU.
std::vector<Change> list_changes(const Target& target, const ProgramProfile& profile, const Report& whole,
                                 const Before& before);

/// Whether an option of a program is its batch size: "--batch-size", "-b", "train.batch_size"; not that of an evaluation.
bool names_batch(std::string_view option);

/// Checkpoints of parts of an nn.Sequential that has no blocks; `profile.layers` are at least 4.
Change checkpoint_layers(const ProgramProfile& profile);

/// Takes from the report what autograd keeps of each block.
void weigh_blocks(ProgramProfile& profile, const Report& whole);

/// Checkpoints of `count` blocks: of those that keep most for each module that runs again.
Change checkpoint_blocks(const ProgramProfile& profile, std::size_t count);
/// Checkpoints of these of profile.blocks.
Change checkpoint_chosen(const ProgramProfile& profile, std::vector<std::size_t> chosen);
/// What autograd keeps of the chosen ones of these blocks goes to the host, beside what the others compute.
Change offload_chosen(const ProgramProfile& profile, const std::vector<std::size_t>& blocks,
                      const std::vector<std::size_t>& chosen);

/// As few blocks as should do, where checkpoints of all lower what is reserved from `before` to `reserved`, below
/// `available`. Each is taken to save by the share of what it keeps.
std::size_t fewest_checkpoints(const ProgramProfile& profile, int64_t before, int64_t reserved, int64_t available);
Change expandable_segments();

/// The combinations of two and three of what was measured that should fit, the cheapest first. Peaks are taken to fall by
/// the product of their shares.
std::vector<std::vector<Change>> combine(const std::vector<MeasuredFix>& measured, const Before& before);

/// The peak that a report predicts of it; false where it knows what the fix frees alone.
bool take_prediction(Change& change, const Fix& fix);

/// Those that help first: of them the cure of the reason, then the fastest; then the others by their peak.
void sort_fixes(std::vector<MeasuredFix>& fixes, const Before& before, std::optional<int64_t> batch);

/// Why no run is made of it; empty: one is.
std::string why_not_run(const Change& change, const Before& before);

/// The fixes that a report `offered` and nobody ran, with the reason.
std::vector<MeasuredFix> list_not_run(const std::vector<Fix>& offered, const std::vector<MeasuredFix>& tried,
                                      const Before& before);

/// Runs all that is needed, or what was run when somebody interrupted. Throws Interrupted where not even the program as it is
/// was run.
Fixed search_fix(const Target& target, Experiments& experiments,
                 const std::function<void(std::size_t, std::size_t)>& on_done);

/// Writes what was found into a run folder: fix.json, and into report.json what the complete run needs and the measured figures
/// of the fixes.
void remember(const Fixed& fixed, const std::string& json, const std::filesystem::path& folder);

std::string to_text(const Fixed& fixed, const Target& target, const std::string& command);
std::string to_json(const Fixed& fixed, const Target& target, const std::string& command);

}  // namespace oomdiag
