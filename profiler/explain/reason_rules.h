#pragma once

#include "profiler/explain/reasons.h"

// Rows of kReasons (reasons.cpp), one function each: what it finds, or nothing.

namespace oomdiag {

using Found = std::optional<Reason>;

/// Tensors of each of a set with each other one fill the memory.
Found find_tensors_of_pairs(const ReasonFacts& facts);

/// Forward passes of an evaluation that build graphs.
Found find_evaluation_after_training(const ReasonFacts& facts);
Found find_graphs_in_evaluation(const ReasonFacts& facts);
/// The same of a program that has never run backward.
Found find_graphs_without_backward(const ReasonFacts& facts);
/// Forward passes of a training step before its one backward.
Found find_several_passes(const ReasonFacts& facts);
/// The same of a loop whose turns no module tells apart.
Found find_graphs_of_loop(const ReasonFacts& facts);
/// A loop within one forward pass, as of a cell over a long sequence.
Found find_unrolled_sequence(const ReasonFacts& facts);
/// A recurrent state that the next step goes on with, graph and all.
Found find_attached_state(const ReasonFacts& facts);
Found find_key_value_cache(const ReasonFacts& facts);
/// Results that are concatenated, or data that gets larger with each step.
Found find_growing_buffer(const ReasonFacts& facts);
Found find_full_matrices(const ReasonFacts& facts);
Found find_float64(const ReasonFacts& facts);
/// Square matrices in the optimizer's state, far larger than what is trained.
Found find_preconditioners(const ReasonFacts& facts);
/// Enough is free, in pieces.
Found find_fragmentation(const ReasonFacts& facts);
/// The program's own limit ended it.
Found find_own_limit(const ReasonFacts& facts);
Found find_create_graph(const ReasonFacts& facts);
Found find_earlier_graphs(const ReasonFacts& facts);
/// Tensors in graphs that modules have as attributes, and that the next call goes on with.
Found find_handed_states(const ReasonFacts& facts);
/// Parameters and their state, of which each step has more.
Found find_growing_model(const ReasonFacts& facts);
Found find_small_views(const ReasonFacts& facts);
Found find_kept_tensors(const ReasonFacts& facts);
/// torch.cat() and the like, of what each step has left: as much again.
Found find_joined_results(const ReasonFacts& facts);
Found find_one_checkpoint(const ReasonFacts& facts);
/// Modules whose attributes ask for activation checkpointing, and that keep their activations.
Found find_checkpoints_without_effect(const ReasonFacts& facts);
/// AccumulateGrad's copy of a gradient.
Found find_copied_gradient(const ReasonFacts& facts);
Found find_autocast_cache(const ReasonFacts& facts);
Found find_repeated_casts(const ReasonFacts& facts);
Found find_optimizer_temporaries(const ReasonFacts& facts);
Found find_caught(const ReasonFacts& facts);
Found find_kept_traceback(const ReasonFacts& facts);
Found find_output_on_context(const ReasonFacts& facts);
Found find_collected_results(const ReasonFacts& facts);
/// The same where they are most of all: then it matters little what they are.
Found find_mostly_collected(const ReasonFacts& facts);
Found find_kept_gradients(const ReasonFacts& facts);
Found find_large_buffers(const ReasonFacts& facts);
Found find_private_pools(const ReasonFacts& facts);
Found find_attention_scores(const ReasonFacts& facts);
Found find_all_pairs(const ReasonFacts& facts);
/// The same of a product of two tensors none of which is a weight.
Found find_pairs_of_data(const ReasonFacts& facts);
/// What a product of tensors makes before it multiplies: a broadcast operand as a copy, or products of the elements that einsum() sums
/// later.
Found find_intermediate_of_product(const ReasonFacts& facts);
/// The same of several operands, where their order makes it so.
Found find_intermediates_of_einsum(const ReasonFacts& facts);
/// Without a graph: results of all layers of a list, where one is needed.
Found find_results_of_each_layer(const ReasonFacts& facts);
/// A key-value cache of which there are two: the one before, and what torch.cat() makes of it.
Found find_cache_made_anew(const ReasonFacts& facts);
/// A graph of ops that no module called, in a program that never runs backward.
Found find_graph_without_layers(const ReasonFacts& facts);
Found find_one_hot(const ReasonFacts& facts);
Found find_logits(const ReasonFacts& facts);
Found find_embedding_gradients(const ReasonFacts& facts);
Found find_sparse_operand(const ReasonFacts& facts);
Found find_models_in_cycles(const ReasonFacts& facts);
Found find_several_models(const ReasonFacts& facts);
/// Copies of weights by copy.deepcopy.
Found find_deep_copies(const ReasonFacts& facts);
Found find_loaded(const ReasonFacts& facts);
/// A file's tensors that nothing uses any more, looked at before what the step itself needs: the request would fit without them.
Found find_loaded_in_the_way(const ReasonFacts& facts);
Found find_sort_temporaries(const ReasonFacts& facts);
Found find_data_on_gpu(const ReasonFacts& facts);
Found find_earlier_outputs(const ReasonFacts& facts);

/// Variables of a loop still have what the turn before made, as the next turn makes it.
Found find_replaced_variables(const ReasonFacts& facts);
/// Tensors of earlier steps that attributes or containers of the program keep, where memory ran out after too few steps to call it growth.
Found find_few_kept_tensors(const ReasonFacts& facts);
/// Scores, masks or biases of attention of so many positions that they fill the memory.
Found find_long_attention(const ReasonFacts& facts);
/// Several dense matrices of n × n, side by side.
Found find_square_matrices(const ReasonFacts& facts);
/// A gradient of a weight for each sample of a batch.
Found find_gradients_of_samples(const ReasonFacts& facts);
/// Nothing but how many rows a forward pass works on, and what each of them takes.
Found find_many_rows(const ReasonFacts& facts);
/// Indices of 64 bits, one for each element, where one for each row would do.
Found find_wide_index(const ReasonFacts& facts);
/// One tensor that a variable has: what is left to say where no other row holds.
Found find_largest_tensor(const ReasonFacts& facts);
/// Tensors of the program's own that are as large in all dimensions but the last.
Found find_equal_rows(const ReasonFacts& facts);
/// Rows of a small table that a module looks up for each of many indices.
Found find_copied_rows_of_table(const ReasonFacts& facts);
Found find_large_batch(const ReasonFacts& facts);
Found find_enlarged(const ReasonFacts& facts);
/// x[:, index] with an index for each row of x, where one value of each row was meant.
Found find_indexed_pairs(const ReasonFacts& facts);
/// Rows that an index selects, several times as large as what they were selected of.
Found find_gathered_rows(const ReasonFacts& facts);
/// One op of the program itself, and of no layer, that requests a large part of the memory: what is left where nothing more special is known.
Found find_large_result(const ReasonFacts& facts);
/// Rows that are copied before the layers that follow, where a view would do or what layers make of one row serves all of them.
Found find_repeated_rows(const ReasonFacts& facts);
/// A tensor that is repeated many times: a buffer of the model, or one that a variable has.
Found find_repeated_tensor(const ReasonFacts& facts);
/// A view of few elements that a layer copies as if they were many.
Found find_expanded_copy(const ReasonFacts& facts);
/// A copy in a wider type.
Found find_large_cast(const ReasonFacts& facts);
/// State of an optimizer of before, beside that of the one that takes its place.
Found find_earlier_optimizer(const ReasonFacts& facts);
/// Steps each of which needs more than the one before, and leaves nothing behind.
Found find_growing_steps(const ReasonFacts& facts);
/// One elementwise op after the other, whose results live side by side.
Found find_elementwise_copies(const ReasonFacts& facts);
/// What one line joined the last time, and a little more.
Found find_concatenated_results(const ReasonFacts& facts);
/// Parameters that are copied, one after the other, into a type twice as wide.
Found find_widened_weights(const ReasonFacts& facts);
/// Images of more than a million pixels, as they are.
Found find_large_images(const ReasonFacts& facts);
/// Results of layers that have a value at each pixel of the images.
Found find_full_resolution(const ReasonFacts& facts);
/// Layers whose results are several times as large as those of the step before.
Found find_larger_step(const ReasonFacts& facts);
/// A model on the GPU none of whose layers has been called yet, while another one runs.
Found find_idle_model(const ReasonFacts& facts);

/// A model is made layer by layer, and one of the same layers is there.
Found find_model_being_made(const ReasonFacts& facts);

/// The weights of a model go to the GPU, and the same are there.
Found find_copied_weight(const ReasonFacts& facts);
/// A model that goes to the GPU beside another one.
Found find_moved_model(const ReasonFacts& facts);
/// The same by itself.
Found find_weights_that_do_not_fit(const ReasonFacts& facts);
/// The same of a model whose layers are being made on the GPU.
Found find_weights_being_made(const ReasonFacts& facts);
/// Weights of layers that neither this step nor the one before has called.
Found find_unused_weights(const ReasonFacts& facts);
/// Weights of a model that is deleted, and that graphs of its results keep.
Found find_deleted_model(const ReasonFacts& facts);
/// Buffers of one size, one in each layer.
Found find_equal_buffers(const ReasonFacts& facts);
Found find_dense_matrix(const ReasonFacts& facts);
Found find_weight_copies(const ReasonFacts& facts);
Found find_large_layer(const ReasonFacts& facts);
Found find_gradients_of_frozen(const ReasonFacts& facts);
Found find_not_under_autocast(const ReasonFacts& facts);
Found find_whole_step(const ReasonFacts& facts);
Found find_model_states(const ReasonFacts& facts);
Found find_reference_cycle(const ReasonFacts& facts);

/// retain_graph=True: nodes that backward has run, and that keep what they saved.
Found find_retained_graph(const ReasonFacts& facts);
/// create_graph=True within a step: a graph of what backward computed.
Found find_second_derivatives(const ReasonFacts& facts);
/// Tensors that backward() of a torch.autograd.Function of the program makes, and its ctx keeps.
Found find_kept_by_functions(const ReasonFacts& facts);
Found find_graph_without_use(const ReasonFacts& facts);
Found find_passes_without_backward(const ReasonFacts& facts);
Found find_passes_before_backward(const ReasonFacts& facts);
Found find_vectorized(const ReasonFacts& facts);

inline constexpr double kLargePart = 0.3;
inline constexpr double kWorthNaming = 0.2;  ///< of graphs, and of what one op makes

/// Of the request that failed; 0 where none did.
int64_t requested_bytes(const ReasonFacts& facts);

/// Whether `bytes` are at least this part of what was allocated and requested.
bool is_large(const ReasonFacts& facts, int64_t bytes, double part = kLargePart);

/// Whether an optimizer has parameters of the program.
bool trains(const ReasonFacts& facts);

}  // namespace oomdiag
