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
  std::vector<std::string> how{};      ///< lines of Python or of a shell
  std::string costs{};
  bool changes_training = false;
  bool at_least = false;  ///< the rule leaves something out: its peak is a lower bound

  bool operator==(const Changed&) const = default;
};

using Rule = std::optional<Changed> (*)(const Situation& situation);

/// The rules, one per remedy. Each gives nothing where it has nothing to change.
// remedy_rules.cpp: what a step works on.
std::optional<Changed> halve_batch(const Situation& situation);
std::optional<Changed> fit_batch(const Situation& situation);
std::optional<Changed> accumulate(const Situation& situation);
std::optional<Changed> use_relu_in_place(const Situation& situation);
std::optional<Changed> use_no_grad(const Situation& situation);
std::optional<Changed> drop_outputs(const Situation& situation);
std::optional<Changed> stop_growth(const Situation& situation);
// autocast.cpp, checkpointing.cpp
std::optional<Changed> use_autocast(const Situation& situation);
std::optional<Changed> checkpoint_modules(const Situation& situation);
// state_rules.cpp: gradients, and what optimizers keep.
std::optional<Changed> set_gradients_to_none(const Situation& situation);
std::optional<Changed> use_fused_optimizer(const Situation& situation);
std::optional<Changed> use_loop_optimizer(const Situation& situation);
std::optional<Changed> use_plain_sgd(const Situation& situation);
std::optional<Changed> use_8bit_adam(const Situation& situation);
std::optional<Changed> offload_optimizer(const Situation& situation);
std::optional<Changed> shard_over_cards(const Situation& situation);
std::optional<Changed> train_adapters(const Situation& situation);
// language_rules.cpp: attention, logits, sequences.
std::optional<Changed> use_fused_attention(const Situation& situation);
std::optional<Changed> use_chunked_cross_entropy(const Situation& situation);
std::optional<Changed> halve_sequence(const Situation& situation);
std::optional<Changed> offload_activations(const Situation& situation);

/// Whether the program trains: where backward was not seen, what autograd keeps tells.
bool trains(const Situation& situation);
/// … or it is not known, as no whole step was seen.
bool may_train(const Situation& situation);

/// "1.31 GiB"
std::string text_of(int64_t bytes);

}  // namespace oomdiag
