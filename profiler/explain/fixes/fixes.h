#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/explain/step/step_model.h"

namespace oomdiag {

/// What a fix costs, in the order in which one would try them.
enum class FixCost : uint8_t {
  none,             ///< the same results at the same speed, or nearly so
  less_precise,     ///< the same training in fewer bits
  smaller_batches,  ///< more and smaller passes
  recomputation,    ///< work is done twice
  host_copies,      ///< memory is copied to the host and back
  other_hardware,   ///< more devices
  other_training    ///< another optimizer, fewer trained parameters, shorter sequences
};

struct ProgramFacts;
struct ModuleSettings;

/// How a program of a framework that owns the training loop gets a fix: an argument of its own classes.
struct FrameworkLine {
  std::string_view framework;  ///< framework_lines.h
  std::string_view lines;      ///< {batch} in them is the batch size with the fix
};

/// Everything about one fix: a row in one of the tables below, in the file of its rules. Who predicts, runs, prints and combines fixes
/// asks its row, and knows no ids.
struct FixRow {
  std::string_view id;  ///< in the JSON and in `fix --only`; numbered ones are "batch_6012"
  std::string_view label;
  std::string_view group;  ///< a program takes one fix of a group
  FixCost cost = FixCost::none;
  bool has_module = false;           ///< one of oomdiag_fixes, called as its id, applies it to an unchanged program
  std::string_view formula{};        ///< how the peak is predicted
  std::string_view cost_text{};      ///< what it costs, in words
  std::string_view lines{};          ///< to paste, separated by '\n'
  bool changes_numerics = false;     ///< results differ beyond the order of sums
  bool changes_training = false;     ///< what is learned differs
  bool cures_growth = false;         ///< of a leak
  bool cures_reason = false;         ///< one of list_cures(): a row of kReasons proposes it
  bool combines = false;             ///< may be had together with others that have this
  bool in_plans = false;             ///< for the whole program, which trains as before: plans are made of it
  bool needs_no_categories = false;  ///< its rule looks at sizes only, so that a memory snapshot is enough
  std::string_view same_as{};        ///< id of the row that predicts the same change from the step, where it does
  /// The step with this fix, nothing where it does not apply; null: it is not predicted, only measured.
  std::optional<ModifiedStep> (*predict)(const StepModel& model) = nullptr;
  /// How its module is applied, nothing where that is not worth a run; null: a cure is where its reason is that of the failure, and
  /// others need more than a row says.
  std::optional<ModuleSettings> (*configure)(const ProgramFacts& program) = nullptr;
  FrameworkLine in_frameworks[6]{};
};

// The tables, by what their fixes change.
std::span<const FixRow> list_step_fixes();
std::span<const FixRow> list_state_fixes();
std::span<const FixRow> list_language_fixes();
std::span<const FixRow> list_autocast_fixes();
std::span<const FixRow> list_checkpoint_fixes();
std::span<const FixRow> list_batch_fixes();
std::span<const FixRow> list_cures();  // proposed by reasons

/// All fixes that oomdiag knows, in the order of these tables: of two that could be combined the first is applied first.
std::span<const FixRow> list_fixes();

/// The row of an id, of a numbered one too; nullptr for unknown ones and for combinations ("checkpoint+autocast_bf16").
const FixRow* find_fix(std::string_view id);

/// Whether it is the cure of a reason, and proposed with that alone.
bool cures_reason(std::string_view id);

/// Whether `cure` has no module of its own, and that of `id`, which is the same change, is run in its place.
bool is_run_as(std::string_view cure, std::string_view id);

/// `lines` one by one.
std::vector<std::string> split_lines(std::string_view lines);

}  // namespace oomdiag
