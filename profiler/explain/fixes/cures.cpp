#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/words/evaluation.h"
#include "profiler/trace/stack_call.h"

// Fixes that cure a reason (reasons.cpp): each is proposed with it alone, and tried where it is the reason of the failure.

namespace oomdiag {
namespace {

/// Where no graph is needed: the function that evaluates, else the line of the program that calls the model.
std::optional<ModuleSettings> around_the_evaluation(const ProgramFacts& program) {
  if (!program.reason || program.reason->fix != "no_grad_in_evaluation") return {};
  ModuleSettings around{.settings = {{"lines", program.reason->how}}};
  for (const std::string& line : program.stack) {
    const StackCall call = parse_call(line);
    if (call.function.empty()) continue;
    if (is_evaluation(call.function)) {
      around.settings["function"] = call.function;
      return around;
    }
    if (!around.settings.contains("line")) around.settings["line"] = call.short_place();
  }
  return around;
}

std::optional<ModuleSettings> where_steps_add_up(const ProgramFacts& program) {
  return unless(!program.grows && (program.failing_step <= 1 || program.reason));
}

constexpr FixRow kCures[] = {
    {.id = "finer_checkpoints", .label = "checkpoint each layer by itself", .group = "checkpoint"},
    {.id = "autocast_without_cache", .label = "autocast without its weight cache", .group = "autocast"},
    {.id = "autocast_with_cache", .label = "autocast with its weight cache", .group = "autocast"},
    {.id = "fused_or_single",
     .label = "a fused optimizer, or one parameter after the other",
     .group = "optimizer",
     .lines = "optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # or foreach=False",
     .same_as = "fused_optimizer"},
    {.id = "retry_outside_except", .label = "try again outside of the except block", .group = "program"},
    {.id = "gradients_to_none", .label = "gradients set to None once they have served", .group = "grad"},
    {.id = "freeze_the_rest", .label = "no gradients for what is not trained", .group = "grad"},
    {.id = "autocast_here_too", .label = "autocast in the evaluation, too", .group = "autocast"},
    {.id = "one_graph_pool", .label = "one memory pool for all CUDA graphs", .group = "pools"},
    {.id = "fused_attention", .label = "fused attention (SDPA)", .group = "attention", .same_as = "sdpa"},
    {.id = "class_indices", .label = "class indices in place of one-hot labels", .group = "loss"},
    {.id = "loss_in_chunks",
     .label = "cross-entropy in chunks, without all logits at once",
     .group = "loss",
     .same_as = "chunked_cross_entropy"},
    {.id = "no_sparse_gradient", .label = "no gradient for the sparse matrix", .group = "grad"},
    {.id = "drop_models",
     .label = "drop models that are no longer used, or keep them on the host",
     .group = "program",
     .in_frameworks = {{"diffusers", "pipe.enable_model_cpu_offload()"}}},
    {.id = "load_to_host", .label = "load the file to the host", .group = "program", .has_module = true},
    {.id = "data_on_host", .label = "keep the data on the host, and copy each batch", .group = "program"},
    {.id = "delete_outputs", .label = "delete tensors of a step at its end", .group = "program", .has_module = true},
    {.id = "collect_garbage",
     .label = "gc.collect() where reference cycles are left",
     .group = "garbage",
     .has_module = true,
     .configure = where_steps_add_up},
    {.id = "break_cycle",
     .label = "no reference cycle through the graph",
     .group = "growth",
     .lines =
         "gc.collect()  # after each step, if the cycle is of Python's objects alone\n"
         "node.register_hook(functools.partial(hook, weakref.ref(self)))  # else no hook that refers to its graph\n"
         "with torch.no_grad():  # around writes in place that nothing differentiates; of a view that its own tensor "
         "keeps: .clone()"},
    {.id = "split_batch",
     .label = "split the batch, and run part after part",
     .group = "batch",
     .in_frameworks =
         {{"diffusers", "pipe.vae.enable_slicing()  # one image at a time; pipe.vae.enable_tiling(): tiles of it"},
          {"torch_geometric",
           "NeighborLoader(data, num_neighbors=[-1], batch_size=1024)  # a part of the graph at a time"},
          {"captum",
           "attributions = method.attribute(…, internal_batch_size=8)  # of n_steps or n_samples so many at a time"}}},
    {.id = "no_grad_in_evaluation",
     .label = "torch.no_grad() around the evaluation",
     .group = "grad",
     .has_module = true,
     .same_as = "no_grad",
     .configure = around_the_evaluation},
    {.id = "weights_as_they_are",
     .label = "weights in the type that they have",
     .group = "autocast",
     .lines = "# no cast of frozen weights; peft: prepare_model_for_kbit_training() is for quantized models\n"
              "for p in model.parameters():\n"
              "    if p.requires_grad: p.data = p.data.float()  # only what is trained",
     .changes_numerics = true},
    {.id = "smaller_images",
     .label = "smaller images",
     .group = "batch",
     .lines =
         "images = F.interpolate(images, scale_factor=0.5)  # half the height and width, of masks, too; or as they are "
         "loaded: transforms.Resize(…), crops",
     .changes_training = true},
    {.id = "fewer_matrices",
     .label = "matrices in place, or sparse",
     .group = "data",
     .lines =
         "torch.diagonal(matrix).fill_(-1)  # in place: no identity beside it; x.sub_(y) in place of x - y\n"
         "matrix = matrix.to_sparse()  # where most of it is zero\n"
         "for rows in x.split(1024): loss_of(rows @ y.T)  # blocks of rows, where each is reduced before the next"},
    {.id = "samples_in_parts",
     .label = "gradients of some samples at a time",
     .group = "batch",
     .lines = "for part in batch.split(16): per_sample(part)  # reduce or clip each part's gradients, and add them up\n"
              "torch.func.vmap(grad, chunk_size=16)(params, batch)  # of torch.func; opacus: BatchMemoryManager"},
    {.id = "fewer_rows",
     .label = "fewer rows at once",
     .group = "batch",
     .lines = "x = x[…]  # a part of the points or patches, sampled neighbours, shorter sequences\n"
              "# or smaller batches, whose gradients add up",
     .changes_training = true,
     .in_frameworks =
         {{"captum",
           "attributions = method.attribute(…, internal_batch_size=8)  # of n_steps or n_samples so many at a time"}}},
    {.id = "no_grad_untrained", .label = "torch.no_grad() around what is not trained", .group = "grad"},
    {.id = "vmap_in_chunks",
     .label = "vmap over some samples at a time",
     .group = "pairs",
     .lines = "torch.func.vmap(f, chunk_size=64)(x)  # so do jacrev(f, chunk_size=64) and jacobian's loop over rows"},
    {.id = "plain_backward",
     .label = "backward() without retain_graph=True",
     .group = "grad",
     .lines = "loss.backward()  # retain_graph=True only where another backward goes through the same graph\n"
              "fake = generator(z).detach()  # where another model learns from an output: its graph ends there"},
    {.id = "parts_of_jacobian",
     .label = "derivatives of a part, or products with them",
     .group = "growth",
     .lines = "torch.func.vmap(torch.func.jacrev(f))(x)  # of each sample by its own inputs alone, where samples do "
              "not mix\n"
              "torch.autograd.functional.vjp(f, x, v)  # or jvp, hvp: a product with it needs no rows"},
    {.id = "derivatives_in_parts",
     .label = "second derivatives of a part at a time",
     .group = "grad",
     .lines = "for part in x.split(64): loss_of(part).backward()  # gradients add up, as of the sum\n"
              "torch.autograd.grad(y, x, create_graph=model.training)  # a validation needs first derivatives alone\n"
              "# for a product with a Hessian: torch.func.jvp of the gradient, or a difference of two gradients"},
    {.id = "backward_of_each_pass",
     .label = "backward() of each forward pass",
     .group = "grad",
     .lines = "loss.backward()  # in the loop; gradients add up, as of the sum",
     .in_frameworks = {{"accelerate", "accelerator.backward(loss)  # in the loop: gradients add up, as of the sum"}}},
    {.id = "checkpoint_each_pass",
     .label = "checkpoint each forward pass",
     .group = "checkpoint",
     .lines = "state = torch.utils.checkpoint.checkpoint(step, state, use_reentrant=False)  # runs again in backward\n"
              "buffer[t] = state.detach()  # what is only stored of a pass, as a rollout's; and torch.no_grad() around "
              "a rollout",
     .in_frameworks =
         {{"torchdiffeq",
           "from torchdiffeq import odeint_adjoint as odeint  # backward solves once more, and nothing is kept of each "
           "evaluation"}}},
    {.id = "checkpoints_on", .label = "checkpointing that takes effect", .group = "checkpoint"},
    {.id = "gradient_without_copy",
     .label = "no other reference to the gradient",
     .group = "grad",
     .lines =
         "ctx.save_for_backward(gradient)  # in place of ctx.gradient = gradient; and no hook or list that keeps it"},
    {.id = "limited_parameters",
     .label = "a limit on how many parameters there are",
     .group = "growth",
     .lines = "count = min(count, limit - len(points))  # where parameters are added; and remove what is of no use",
     .changes_training = true},
    {.id = "one_of_each_row",
     .label = "one value of each row",
     .group = "pairs",
     .lines = "x[torch.arange(len(index)), index]  # or x.gather(1, index[:, None]): no row for each index"},
    {.id = "smaller_weights",
     .label = "weights in half precision before they go to the GPU",
     .group = "autocast",
     .lines = "model = model.to(torch.bfloat16).cuda()  # first the type, then the device; from_pretrained(…, "
              "dtype=torch.bfloat16)",
     .changes_numerics = true},
    {.id = "smaller_states",
     .label = "weights and their state in half precision, or fewer that are trained",
     .group = "autocast",
     .lines =
         "model = model.to(torch.bfloat16)  # before the optimizer is made: parameters, gradients and state of half "
         "the size\n"
         "for p in model.parameters(): p.requires_grad_(False)  # and True for the last layers, or for adapters "
         "(LoRA) alone\n"
         "optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())  # a quarter of AdamW's state",
     .changes_numerics = true},
    {.id = "detach_state", .label = "detach the recurrent state", .group = "growth"},
    {.id = "save_output", .label = "outputs by save_for_backward()", .group = "growth"},
    {.id = "segments_that_grow",
     .label = "expandable_segments:True",
     .group = "segments",
     .lines = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"},
    {.id = "larger_fraction",
     .label = "a larger share of the GPU",
     .group = "segments",
     .lines = "torch.cuda.set_per_process_memory_fraction(0.95)  # where the program sets less, or its allocator "
              "settings do"},
    {.id = "truncated_backward",
     .label = "backward every few positions of the sequence (truncated)",
     .group = "grad",
     .lines = "if position % 50 == 49: loss.backward(); loss = 0; state = state.detach()  # or shorter sequences",
     .changes_training = true},
    {.id = "logits_in_parts",
     .label = "logits of some rows at a time",
     .group = "loss",
     .lines = "for part in hidden.split(256): scores = head(part)  # and of each only what is used: topk, a "
              "log-probability\n"
              "# logits_to_keep=n, where few positions are used; the model without its head, where hidden states are\n"
              "logp = picked - part.logsumexp(-1)  # of one word each: without log_softmax of all"},
    {.id = "stay_sparse",
     .label = "sparse matrices in place of dense ones",
     .group = "pairs",
     .lines = "y = torch.sparse.mm(adjacency, x)  # without to_dense(); the identity: y + x"},
    {.id = "sort_in_parts",
     .label = "sort some columns at a time, or on the host",
     .group = "pairs",
     .lines = "parts = [torch.quantile(part, q, dim=0) for part in x.split(8, dim=1)]  # or of x.cpu(), or of a sample "
              "of rows"},
    {.id = "enlarge_in_parts",
     .label = "enlarge a part at a time",
     .group = "pairs",
     .lines = "for part in scores.split(8, 1): F.interpolate(part, size)  # and reduce it, or .cpu(), before the next"},
    {.id = "repeat_later",
     .label = "a view in place of copies, or copies after the layers",
     .group = "pairs",
     .lines = "x.expand(beams, -1, -1)  # in place of repeat(): a view; or layers first, and their results expanded"},
    {.id = "in_place",
     .label = "elementwise ops in place",
     .group = "pairs",
     .lines =
         "y = x.to(torch.float32, copy=True).div_(scale).clamp_(low, high)  # one copy in place of one for each op"},
    {.id = "masked_fill",
     .label = "a mask that selects without indices",
     .group = "pairs",
     .lines =
         "x = torch.where(mask, x + value, x)  # or x.masked_fill_(mask, value): no indices are made of the mask\n"
         "for part, of_part in zip(x.split(64), mask.split(64)): part[of_part] = value  # or rows in parts; or on the "
         "host"},
    {.id = "as_much_as_before", .label = "parts as large as in the steps before", .group = "batch"},
    {.id = "one_optimizer", .label = "let the optimizer of before go", .group = "program"},
    {.id = "model_later", .label = "keep the model on the host until it is called", .group = "program"},
    {.id = "one_buffer",
     .label = "one buffer for all layers, if theirs are equal",
     .group = "program",
     .lines = "self.mask = mask  # one for all layers, if all are equal; or made when it is needed; a causal one: "
              "F.scaled_dot_product_attention(q, k, v, is_causal=True)"},
    {.id = "smaller_buffers",
     .label = "fewer rows in the model's buffers, or indices in place of a matrix",
     .group = "program",
     .lines =
         "x[senders]  # by an index for each row, in place of matrix @ x where the matrix is of zeros and ones\n"
         "memory = torch.rand(65536, width)  # a queue of the last rows, in place of one for each sample; or .half()"},
    {.id = "smaller_result",
     .label = "make it in parts, or smaller",
     .group = "pairs",
     .in_frameworks = {{"monai",
                        "sliding_window_inference(…, sw_device=\"cuda\", device=\"cpu\")  # the result on the host"}}},
    {.id = "copies_on_host",
     .label = "keep copies of weights on the host",
     .group = "program",
     .lines = "average = copy.deepcopy(model).cpu()  # of a state dict: {name: w.cpu() for name, w in state.items()}"},
    {.id = "model_on_host", .label = "the other model before training, or on the host", .group = "program"},
    {.id = "smaller_layer",
     .label = "fewer inputs or outputs of the largest layer",
     .group = "program",
     .lines = "nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, width))",
     .changes_training = true},
    {.id = "smaller_cache",
     .label = "a smaller key-value cache",
     .group = "growth",
     .lines =
         "generate(…, cache_implementation=\"offloaded\")  # of transformers; else fewer sequences, or fewer tokens, "
         "at a time"},
    {.id = "cache_in_place",
     .label = "one cache, written in place",
     .group = "growth",
     .lines = "cache[:, :, t] = k  # in a buffer of full length; transformers: cache_implementation=\"static\"\n"
              "old[layer] = None  # or let each layer's go before its new one is made"},
    {.id = "shorter_sequences",
     .label = "shorter sequences",
     .group = "sequence",
     .cost = FixCost::other_training,
     .lines = "tokenizer(texts, truncation=True, max_length=512)  # it grows with the square of the longest text\n"
              "# batches of texts of about one length: group_by_length=True; rarely is the longest one needed",
     .changes_training = true},
    {.id = "less_padding", .label = "less padding", .group = "sequence"},
    {.id = "results_of_used_layers",
     .label = "results of the layers that are used alone",
     .group = "growth",
     .lines = "hidden = model(ids, output_hidden_states=False).last_hidden_state  # where the last layer's is enough\n"
              "features.append(x.cpu())  # of several: on the host, or pooled at once"},
    {.id = "results_to_host",
     .label = "results on the host",
     .group = "growth",
     .lines = "results.append(output.cpu())  # and torch.cat(results) after the loop",
     .in_frameworks = {{"transformers",
                        "TrainingArguments(…, eval_accumulation_steps=1)\n"
                        "Trainer(…, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1))"},
                       {"trl", "SFTConfig(…, eval_accumulation_steps=1)"}}},
    {.id = "pairs_in_chunks",
     .label = "pairs in chunks of rows",
     .group = "pairs",
     .lines = "for part in a.split(1024): …  # torch.cdist(part, b) or part @ b.T, reduced in the loop"},
    {.id = "reduced_svd",
     .label = "SVD with full_matrices=False",
     .group = "svd",
     .lines = "torch.linalg.svd(a, full_matrices=False)"},
    {.id = "no_preconditioner",
     .label = "no square matrices of long dimensions",
     .group = "optimizer",
     .cost_text = "another optimizer for these weights, as AdamW",
     .lines = "long = [p for p in model.parameters() if max(p.shape) > 8192]  # embeddings and heads: AdamW(long)\n"
              "short = [p for p in model.parameters() if max(p.shape) <= 8192]  # or a limit of the optimizer, as "
              "block_size or max_precondition_dim",
     .changes_training = true},
    {.id = "sparse_embedding",
     .label = "sparse gradients of embeddings",
     .group = "embedding",
     .cost_text = "an optimizer that takes them: SparseAdam, SGD",
     .lines = "nn.Embedding(…, sparse=True)  # and torch.optim.SparseAdam or SGD for it"},
    {.id = "float32",
     .label = "float32 in place of float64",
     .group = "autocast",
     .lines = "model.float(); x = x.float()",
     .changes_numerics = true},
};

}  // namespace

std::span<const FixRow> list_cures() { return kCures; }

}  // namespace oomdiag
