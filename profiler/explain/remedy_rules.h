#pragma once

#include <optional>

#include "profiler/explain/remedies.h"
#include "profiler/explain/what_if.h"

namespace oomdiag {

/// A step as a remedy would leave it.
struct Changed {
  std::string id, label, formula;
  Lives blocks;
  std::vector<std::string> modules{};  ///< that it is about, where it names some
};

/// The rules, one per remedy. Each gives nothing where it has nothing to change.
std::optional<Changed> halve_batch(const Situation& situation);
std::optional<Changed> fit_batch(const Situation& situation);
std::optional<Changed> accumulate(const Situation& situation);
std::optional<Changed> use_autocast(const Situation& situation);
std::optional<Changed> checkpoint_modules(const Situation& situation);
std::optional<Changed> use_relu_in_place(const Situation& situation);
std::optional<Changed> set_gradients_to_none(const Situation& situation);
std::optional<Changed> use_no_grad(const Situation& situation);
std::optional<Changed> use_fused_optimizer(const Situation& situation);
std::optional<Changed> use_loop_optimizer(const Situation& situation);
std::optional<Changed> use_plain_sgd(const Situation& situation);
std::optional<Changed> drop_outputs(const Situation& situation);
std::optional<Changed> stop_growth(const Situation& situation);

}  // namespace oomdiag
