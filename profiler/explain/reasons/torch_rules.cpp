#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/one_of.h"
#include "profiler/replay/evidence/autocast_cache.h"
#include "profiler/replay/history.h"

// Rows of kReasons about what PyTorch itself makes: checkpoints, casts of autocast, temporaries of optimizers, pools of CUDA graphs, gradients
// that are copied.

namespace oomdiag {
namespace {

// Graphs that are captured one after the other share it: what a smaller one needed serves no larger one.
Found names_one_pool(int64_t bytes, const std::vector<int64_t>& segments) {
  constexpr size_t kSeveral = 4;
  if (segments.size() < kSeveral) return {};
  return Reason{
      .text = fmt::format("the private memory pool of CUDA graphs holds {} in {} segments of up to {}: a graph reuses "
                          "what those captured before it needed only where it needs no more",
                          with_unit(bytes), segments.size(), with_unit(std::ranges::max(segments))),
      .bytes = bytes,
      .fix = "one_graph_pool",
      .how = {"for batch in sorted(batch_sizes, reverse=True): capture(batch)  # the largest first; and fewer sizes"}};
}

}  // namespace

Found find_one_checkpoint(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr) return {};
  const Share saved = sum_category(facts, Category::activation);
  const bool is_of_segments = failed->phase == Phase::forward && contains(failed->stack, "checkpoint_sequential");
  if (is_of_segments && is_large(facts, saved.bytes, 0.5)) {
    return Reason{.text = fmt::format("checkpoint_sequential does not checkpoint its last segment, which holds {}: too "
                                      "few segments",
                                      with_unit(saved.bytes)),
                  .bytes = saved.bytes,
                  .fix = "finer_checkpoints",
                  .how = {"torch.utils.checkpoint.checkpoint_sequential(layers, len(layers), x, use_reentrant=False)"}};
  }
  if (facts.device.packed_tensors == 0) return {};
  const Share again = sum_blocks(facts, [](const LiveBlock& block) {
    return block.phase == Phase::backward && block.category == Category::activation;
  });
  if (!is_large(facts, again.bytes, 0.5)) return {};
  return Reason{
      .text = fmt::format("one checkpoint around too much: its recomputation holds {} at once", with_unit(again.bytes)),
      .bytes = again.bytes,
      .fix = "finer_checkpoints",
      .how = {"for layer in layers: x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)"}};
}

// Models check their flag where they call their layers: of a flag that was set on another module, or is looked at in training mode only,
// nobody hears.
Found find_checkpoints_without_effect(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !failed->asks_for_checkpoints) return {};
  Share saved = sum_category(facts, Category::activation);
  int64_t in_graph = 0;  // of a forward pass that is under way not all of its nodes are known
  for (const StepAllocation& block : facts.device.step_allocations.blocks)
    in_graph += is_of_forward_graph(block) && block.died == StepAllocation::kNever ? block.bytes : 0;
  saved.bytes = std::max(saved.bytes, in_graph);
  if (runs_checkpoints(facts) || !is_large(facts, saved.bytes)) return {};
  const std::string_view mode = failed->modules_evaluate ? ", and the model is in evaluation mode" : "";
  return Reason{
      .text = fmt::format("checkpointing has no effect: a layer's attribute asks for it{}, but nothing is "
                          "checkpointed, and {} of activations are kept{}",
                          mode, with_unit(saved.bytes), at(saved.made())),
      .bytes = saved.bytes / 10 * 7,
      .fix = "checkpoints_on",
      .how = {
          failed->modules_evaluate
              ? "model.train()  # where its forward() checkpoints in training mode only"
              : "model.gradient_checkpointing_enable()  # or the attribute of the module whose forward() reads it"}};
}

// AccumulateGrad takes the gradient that it is given, unless something else refers to it: then it makes a copy.
Found find_copied_gradient(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !contains(failed->where.node, "AccumulateGrad")) return {};
  const bool is_copy = any_op(failed->where, {"aten::new_empty_strided", "aten::empty_strided", "aten::clone"});
  if (!is_copy || !is_large(facts, failed->requested_bytes, 0.2)) return {};
  return Reason{.text = fmt::format(
                    "a gradient of {} is copied as it is put into .grad, as something else refers to it too, or it "
                    "has other strides than its tensor",
                    with_unit(failed->requested_bytes)),
                .bytes = failed->requested_bytes,
                .fix = "gradient_without_copy"};
}

Found find_autocast_cache(const ReasonFacts& facts) {
  const AutocastUse use = find_autocast(facts.device.state);
  if (!is_large(facts, use.cache_bytes, 0.2)) return {};
  const bool infers = facts.device.attribution.backward_bytes == 0;
  if (!infers) return {};  // backward needs them
  return Reason{.text = fmt::format("autocast's weight cache: {} of casts are kept until the autocast region ends",
                                    with_unit(use.cache_bytes)),
                .bytes = use.cache_bytes,
                .fix = "autocast_without_cache",
                .how = {fmt::format("with torch.autocast(\"cuda\", torch.{}, cache_enabled=False):", use.dtype)}};
}

// Without its cache, autocast casts a weight whenever a layer uses it, and autograd keeps each cast until backward.
Found find_repeated_casts(const ReasonFacts& facts) {
  const AutocastUse use = find_autocast(facts.device.state);
  if (!is_large(facts, use.repeated_bytes)) return {};
  return Reason{.text = fmt::format("autocast casts the same weights again and again{}: {} casts are kept for backward "
                                    "beside the first of each, {}",
                                    at(failed_in(facts)), use.repeated_count, with_unit(use.repeated_bytes)),
                .bytes = use.repeated_bytes,
                .fix = "autocast_with_cache",
                .how = {fmt::format("with torch.autocast(\"cuda\", torch.{}):  # cache_enabled=True, one region around "
                                    "the whole forward pass",
                                    use.dtype)}};
}

namespace {

/// What a step of one parameter after the other makes beside it, as the square root of a moment: of a weight that is most of all.
Found find_temporaries_of_weight(const ReasonFacts& facts, const OutOfMemory& failed) {
  const LiveBlock* const weight = sum_category(facts, Category::parameter).largest;
  if (weight == nullptr || failed.requested_bytes != weight->requested_bytes) return {};
  const Share made = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.category == Category::temporary && block.phase == Phase::optimizer &&
           block.requested_bytes == weight->requested_bytes;
  });
  const int64_t bytes = made.bytes + failed.requested_bytes;
  if (made.count == 0 || !is_large(facts, bytes)) return {};
  const std::string name = weight->name.empty() ? "the largest weight" : std::string(weight->name);
  return Reason{.text = fmt::format(
                    "the optimizer's step makes {} tensors as large as {}{}, {} in all, above the weight, "
                    "its gradient and its state ({}{})",
                    made.count + 1, name, comma_shape(*weight), with_unit(bytes), failed.where.op, at(failed.where)),
                .bytes = bytes,
                .fix = "fused_or_single",
                .how = {"optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # makes none of them; or the "
                        "weight in several parameters"}};
}

}  // namespace

Found find_optimizer_temporaries(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase != Phase::optimizer) return {};
  const auto is_foreach = [](const Where& where) {
    return where.op.starts_with("aten::_foreach") || where.inner.starts_with("aten::_foreach");
  };
  if (!is_foreach(failed->where)) {
    if (Found of_weight = find_temporaries_of_weight(facts, *failed)) return of_weight;
  }
  const Share temporaries = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.category != Category::optimizer_state && is_foreach(block.made);
  });
  if (!is_large(facts, temporaries.bytes + (is_foreach(failed->where) ? failed->requested_bytes : 0), 0.1)) return {};
  return Reason{.text = fmt::format("the optimizer's step works on all parameters at once (foreach): {} of temporaries",
                                    with_unit(temporaries.bytes + failed->requested_bytes)),
                .bytes = temporaries.bytes + failed->requested_bytes,
                .fix = "fused_or_single"};
}

Found find_private_pools(const ReasonFacts& facts) {
  std::map<uint8_t, int64_t> pools;
  std::vector<int64_t> sizes;  // of the segments of all
  for (const SegmentLayout& segment : facts.device.state.segments) {
    if (segment.pool == 0) continue;
    pools[segment.pool] += segment.bytes;
    sizes.push_back(segment.bytes);
  }
  int64_t bytes = 0;
  for (const auto& [pool, reserved] : pools) bytes += reserved;
  if (pools.empty() || !is_large(facts, bytes)) return {};
  if (pools.size() == 1) return names_one_pool(bytes, sizes);
  return Reason{.text = fmt::format("{} private memory pools of CUDA graphs hold {}, each for itself", pools.size(),
                                    with_unit(bytes)),
                .bytes = bytes,
                .kept_by = "CUDA graphs: each keeps what its pool caches, too",
                .fix = "one_graph_pool",
                .how = {"pool = torch.cuda.graph_pool_handle()", "with torch.cuda.graph(graph, pool=pool):"}};
}

Found find_sparse_operand(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || !failed->where.node.starts_with("Sparse") || !is_large(facts, failed->requested_bytes))
    return {};
  return Reason{.text = fmt::format("a dense gradient of a sparse matrix{}: {}", at(failed->where),
                                    with_unit(failed->requested_bytes)),
                .bytes = failed->requested_bytes,
                .fix = "no_sparse_gradient",
                .how = {"adjacency = adjacency.detach()  # or requires_grad_(False): its gradient is dense"}};
}

}  // namespace oomdiag
