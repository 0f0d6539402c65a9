#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/explain/step_model.h"

namespace oomdiag {

/// What a fix costs, in the order in which one would try them.
enum class FixCost : uint8_t {
  setting,          ///< nothing, and no line of the program changes
  none,             ///< the same results at the same speed, or nearly so
  less_precise,     ///< the same training in fewer bits
  recomputation,    ///< work is done twice, or memory is copied to the host and back
  smaller_batches,  ///< more and smaller passes
  other_hardware,   ///< more devices
  other_training    ///< another optimizer, fewer trained parameters, shorter sequences
};

/// Everything about one fix that does not depend on the program.
struct FixRow {
  std::string_view id;  ///< in the JSON and in `fix --only`; numbered ones are "batch_6012"
  std::string_view label;
  std::string_view group;  ///< a program takes one fix of a group
  FixCost cost = FixCost::none;
  std::string_view module{};      ///< of oomdiag_fixes, which applies it to an unchanged program; empty: none does
  std::string_view formula{};     ///< how the peak is predicted
  std::string_view cost_text{};   ///< what it costs, in words
  std::string_view lines{};       ///< to paste, separated by '\n'
  bool changes_numerics = false;  ///< results differ beyond the order of sums
  bool changes_training = false;  ///< what is learned differs
  bool cures_growth = false;      ///< of a leak
  bool cures_reason = false;      ///< a row of kReasons proposes it
  bool combines = false;          ///< may be had together with others that have this
  std::string_view same_as{};     ///< id of the row that predicts the same change from the step, where it does
  /// The step with this fix, nothing where it does not apply; null: it is not predicted, only measured.
  std::optional<ModifiedStep> (*predict)(const StepModel& model) = nullptr;
};

/// All fixes that oomdiag knows.
std::span<const FixRow> list_fixes();

/// The row of an id, of a numbered one too; nullptr for unknown ones and for combinations ("checkpoint+autocast_bf16").
const FixRow* find_fix(std::string_view id);

/// Whether it is the cure of a reason, and proposed with that alone.
bool cures_reason(std::string_view id);

/// `lines` one by one.
std::vector<std::string> split_lines(std::string_view lines);

}  // namespace oomdiag
