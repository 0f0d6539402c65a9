#include "profiler/explain/reasons.h"

#include <algorithm>

#include "profiler/explain/causes.h"
#include "profiler/explain/common_referrers.h"
#include "profiler/explain/reason_rules.h"
#include "profiler/replay/history.h"

// The second level of a cause: which habit of a program is behind the bytes. Each row of kReasons asks one question of the
// recorded facts; the first that holds is the reason. A row that only may be true is not said.

namespace oomdiag {
namespace {

/// The device had enough of memory, or had it been shared otherwise: what a program needs at once is not what to look at.
bool had_enough(const ReasonFacts& f) {
  return f.cause && (*f.cause == CauseKind::fragmentation || *f.cause == CauseKind::pending_frees ||
                     *f.cause == CauseKind::non_pytorch || *f.cause == CauseKind::fraction_cap ||
                     *f.cause == CauseKind::imbalance);
}

struct ReasonRow {
  std::string_view id;
  Found (*find)(const ReasonFacts& facts);
  bool of_growth = false;  ///< holds for a run that fits so far, too
  bool of_size = false;    ///< only says that much is needed: no reason where there was enough
  bool of_steps = false;   ///< compares the step with those before it, and so can stand beside another one of size
};

constexpr ReasonRow kReasons[] = {
    {"caught_traceback", find_caught},
    {"private_pools", find_private_pools},
    {"caught_traceback", find_kept_traceback, true},
    {"output_on_ctx", find_output_on_context, true},
    {"create_graph", find_create_graph, true},
    {"recurrent_state", find_handed_states, true},
    {"evaluation_keeps_graphs", find_passes_without_backward, true},
    {"repeated_copies", find_repeated_rows},
    {"recurrent_state", find_attached_state, true},
    {"key_value_cache", find_key_value_cache, true},
    {"growing_model", find_growing_model, true},
    {"growing_buffer", find_growing_buffer, true},
    {"reference_cycle", find_reference_cycle, true},
    {"several_forward_passes", find_passes_before_backward, true},
    {"graph_of_earlier_steps", find_earlier_graphs, true},
    {"small_view", find_small_views, true},
    {"joined_results", find_joined_results},
    {"growing_buffer", find_concatenated_results},
    {"copied_cache", find_cache_made_anew},
    {"kept_tensors", find_kept_tensors, true},
    {"kept_by_function", find_kept_by_functions},
    {"second_derivatives", find_second_derivatives},
    {"retained_graph", find_retained_graph},
    {"fraction_cap", find_own_limit},
    {"autocast_cache", find_autocast_cache},
    {"repeated_casts", find_repeated_casts},
    {"copied_weights", find_deep_copies},
    {"loaded_onto_gpu", find_loaded_in_the_way},
    {"kept_tensors", find_mostly_collected},
    {"preconditioners", find_preconditioners},
    {"full_matrices", find_full_matrices},
    {"dense_gradient_of_sparse", find_sparse_operand},
    {"several_models", find_copied_weight},
    {"dense_embedding_gradients", find_embedding_gradients},
    {"one_hot", find_one_hot},
    {"dense_matrix", find_dense_matrix},
    {"outputs_of_earlier_turn", find_replaced_variables},
    {"vectorized_over_all", find_vectorized},
    {"evaluation_keeps_graphs", find_graphs_without_backward},
    {"checkpoints_without_effect", find_checkpoints_without_effect},
    {"evaluation_keeps_graphs", find_evaluation_after_training},
    {"copied_gradient", find_copied_gradient},
    {"gradients_of_samples", find_gradients_of_samples},
    {"attention_scores", find_attention_scores},
    {"sort_temporaries", find_sort_temporaries},
    {"all_pairs", find_pairs_of_data},
    {"logits", find_logits},
    {"large_intermediate", find_intermediate_of_product, false, true},
    {"large_intermediate", find_intermediates_of_einsum},
    {"all_pairs", find_all_pairs},
    {"repeated_copies", find_repeated_tensor, false, true},
    {"repeated_copies", find_expanded_copy, false, true},
    {"indexed_pairs", find_indexed_pairs, false, true},
    {"enlarged", find_enlarged, false, true},
    {"large_cast", find_large_cast, false, true},
    {"widened_weights", find_widened_weights, false, true},
    {"same_buffer_in_layers", find_equal_buffers},
    {"large_buffers", find_large_buffers},
    {"kept_tensors", find_collected_results},
    {"loaded_onto_gpu", find_loaded},
    {"reference_cycle", find_models_in_cycles},
    {"several_models", find_several_models},
    {"several_models", find_weight_copies},
    {"earlier_optimizer", find_earlier_optimizer},
    {"gradients_kept", find_kept_gradients},
    {"gradients_of_frozen", find_gradients_of_frozen},
    {"not_under_autocast", find_not_under_autocast},
    {"idle_model", find_idle_model},
    {"deleted_model", find_deleted_model},
    {"idle_model", find_unused_weights},
    {"several_models", find_model_being_made},
    {"several_models", find_moved_model},
    {"weights_do_not_fit", find_weights_that_do_not_fit},
    {"weights_do_not_fit", find_weights_being_made},
    {"data_on_gpu", find_data_on_gpu},
    {"optimizer_temporaries", find_optimizer_temporaries},
    {"one_checkpoint", find_one_checkpoint},
    {"growing_steps", find_growing_steps, false, true, true},
    {"unrolled_sequence", find_unrolled_sequence},
    {"evaluation_keeps_graphs", find_graphs_in_evaluation},
    {"evaluation_keeps_graphs", find_graph_without_layers},
    {"graph_without_use", find_graph_without_use},
    {"several_forward_passes", find_several_passes},
    {"several_forward_passes", find_graphs_of_loop},
    {"kept_tensors", find_few_kept_tensors},
    {"outputs_of_earlier_step", find_earlier_outputs},
    {"float64", find_float64},
    {"wide_index", find_wide_index, false, true},
    {"enlarged", find_copied_rows_of_table, false, true},
    {"enlarged", find_gathered_rows, false, true},
    {"large_layer", find_large_layer, false, true},
    {"large_images", find_large_images, false, true},
    {"large_images", find_full_resolution, false, true},
    {"model_states", find_model_states, false, true},
    {"long_attention", find_long_attention, false, true},
    {"square_matrices", find_square_matrices, false, true},
    {"elementwise_copies", find_elementwise_copies, false, true},
    {"results_of_each_layer", find_results_of_each_layer, false, true},
    {"batch_without_gradients", find_large_batch, false, true},
    {"larger_step", find_larger_step, false, true, true},
    {"large_result", find_large_result, false, true},
    {"equal_rows", find_equal_rows, false, true},
    {"largest_tensor", find_largest_tensor, false, true},
    {"many_rows", find_many_rows, false, true},
    {"all_pairs", find_tensors_of_pairs, false, true},
    {"whole_step", find_whole_step, false, true},
    {"fragmentation", find_fragmentation},
};

void finish(const ReasonRow& row, Reason& reason) {
  reason.id = row.id;
  reason.text = as_written(reason.text);
}

}  // namespace

std::optional<Reason> find_second_reason(const ReasonFacts& facts, const Reason& first) {
  const auto found = std::ranges::find(kReasons, first.id, &ReasonRow::id);
  if (found == std::end(kReasons) || found->of_growth || found->of_steps) return {};
  for (const ReasonRow& row : kReasons) {
    if (Found reason = row.of_steps ? row.find(facts) : Found{}) {
      finish(row, *reason);
      return reason;
    }
  }
  return {};
}

std::optional<Reason> find_reason(const ReasonFacts& facts) {
  for (const ReasonRow& row : kReasons) {
    if (!facts.device.failure && !row.of_growth) continue;
    if (row.of_size && had_enough(facts)) continue;
    if (Found reason = row.find(facts)) {
      finish(row, *reason);
      return reason;
    }
  }
  return {};
}

}  // namespace oomdiag
