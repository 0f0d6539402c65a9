#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/variable_counts.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons about weights that are there twice, or for nothing: copies, what files had, layers that no step calls.

namespace oomdiag {
namespace {

/// What torch.load makes, it makes without an op: such a tensor of a weight's size is a weight or a moment of a file.
bool is_copy_of_weights(const LiveBlock& block, const std::set<int64_t>& weights) {
  return (block.category == Category::unknown || block.uncalled) && block.made.op.empty() && block.made.node.empty() &&
         !block.before_recording && weights.contains(block.requested_bytes);
}

/// What torch.load put there.
Share find_tensors_of_files(const ReasonFacts& facts) {
  const std::set<int64_t> weights = find_sizes_of_weights(facts);
  return sum_blocks(facts, [&](const LiveBlock& block) {
    return contains(block.made.inner_source, "torch/serialization") ||
           contains(block.made.source, "serialization.py") ||
           (block.made.op.empty() && block.phase == Phase::setup &&
            (block.uncalled || is_one_of(name_of(block.category), {"unknown", "output"}))) ||
           is_copy_of_weights(block, weights);
  });
}

/// Whether a tensor of the program is as large as what was requested.
bool is_second_of_its_size(const ReasonFacts& facts, const OutOfMemory& failed) {
  return std::ranges::any_of(facts.device.state.blocks, [&](const LiveBlock& block) {
    return !block.pending_free && block.requested_bytes == failed.requested_bytes &&
           facts.referrers.find(block) != nullptr;
  });
}

/// Whether torch.load requests another one of a tensor that the program has, which it does without an op.
bool loads_weight(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || (failed->phase != Phase::setup && failed->phase != Phase::other)) return false;
  const Where& where = failed->where;
  const bool has_op = !where.op.empty() || !where.node.empty() || !where.module.empty();
  if (has_op) return false;
  return find_sizes_of_weights(facts).contains(failed->requested_bytes) || is_second_of_its_size(facts, *failed);
}

constexpr const char* kCopyOnHost =
    "best = {name: w.detach().cpu() for name, w in model.state_dict().items()}  # in place of deepcopy()";

/// The variable that has most tensors without a maker, as those of files are, and is no optimizer's: its state, of a file, too, is needed.
std::string find_holder_of_files(const ReasonFacts& facts) {
  VariableCounts holders;
  for (const Referrer& one : facts.device.referrers) {
    const bool is_of_optimizer = contains_one_of(one.variable, {".state'", ".param_groups"});
    const bool is_of_file = one.made.op.empty() && one.born > 0 && module_of(&one).empty();
    if (is_of_file && !is_of_optimizer) holders.add(one.variable, one.storage_bytes);
  }
  return std::string(holders.most());
}

/// `stack`: of the request that failed, if that is one of them.
Reason names_loaded(const ReasonFacts& facts, const Share& loaded, std::string_view stack = {}) {
  const std::vector<StackCall> calls = parse_stack(stack);
  const std::string line = calls.empty() ? at(loaded.made()) : fmt::format(" at {}", calls.front().short_place());
  // Files are loaded before the first step, mostly. What a later one has made may be copies: these are made without an op, too.
  const Referrer* const referrer = loaded.largest == nullptr ? nullptr : facts.referrers.find(*loaded.largest);
  std::string holder = find_holder_of_files(facts);
  if (holder.empty()) holder = variable_of(referrer);
  const bool is_called_so = contains_one_of(holder, {"checkpoint", "ckpt", "resume"});
  const bool may_be_copies = loaded.largest != nullptr && loaded.largest->step > 1 && calls.empty() && !is_called_so;
  const std::string_view dict = holder.starts_with("dict ") ? container_name(holder) : std::string_view();
  const std::string_view state = dict.empty() || dict.find('.') != dict.npos ? "state" : dict;
  std::vector<std::string> lines{
      fmt::format("{} = torch.load(path, map_location=\"cpu\"){}", state, comment_at(loaded.made())),
      fmt::format("del {}  # as soon as the model and the optimizer have it", state)};
  if (may_be_copies) lines.emplace_back(kCopyOnHost);
  return Reason{
      .text = may_be_copies
                  ? fmt::format("torch.load, or copy.deepcopy of a state dict, put tensors onto the "
                                "GPU in step {}: {}",
                                loaded.largest->step, with_unit(loaded.bytes))
                  : fmt::format("torch.load put tensors of a file onto the GPU{}: {}", line, with_unit(loaded.bytes)),
      .bytes = loaded.bytes,
      .kept_by = std::move(holder),
      .fix = "load_to_host",
      .how = std::move(lines)};
}

/// Whether a copy of a weight that the program keeps: of a state dict, or, `beside` a called one, of a model that was not called yet.
bool is_kept_copy(const LiveBlock& block, const std::set<int64_t>& weights, bool beside) {
  const bool is_copied = is_copy(block.made.op) || is_one_of(block.made.op, {"aten::clone", "aten::empty_like"});
  const bool is_result = is_one_of(name_of(block.category), {"input", "output", "unknown"}) && block.made.node.empty();
  const bool is_kept = is_result || (beside && block.uncalled);
  return is_kept && is_copied && block.made.module.empty() && weights.contains(block.requested_bytes);
}

/// Many large tensors that one line cloned while what it cloned is still there: of each size as many as have an original elsewhere.
Share find_clones(const ReasonFacts& facts) {
  constexpr int64_t kMany = 6;
  std::map<std::string_view, std::map<int64_t, Share>> clones;
  std::map<int64_t, int64_t> sizes;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.pending_free || block.requested_bytes < kDistinctBytes) continue;
    ++sizes[block.requested_bytes];
    const bool is_clone = block.made.op == "aten::clone" && block.made.module.empty() && block.made.node.empty();
    if (is_clone && !block.made.source.empty()) clones[block.made.source][block.requested_bytes].add(block);
  }
  Share most;
  for (const auto& [line, of_sizes] : clones) {
    Share doubled;
    for (const auto& [size, share] : of_sizes) {
      if (sizes[size] < 2 * share.count) continue;
      doubled.bytes += share.bytes;
      doubled.count += share.count;
      if (doubled.largest == nullptr) doubled.largest = share.largest;
    }
    if (doubled.count >= kMany && doubled.bytes > most.bytes) most = doubled;
  }
  return most;
}

/// Whether the failing request was to copy one of the weights: of another model that goes to the GPU, parameter by parameter.
bool copies_weight(const ReasonFacts& facts, const std::set<int64_t>& weights) {
  const OutOfMemory* failed = failed_copy(facts);
  return failed != nullptr && weights.contains(failed->requested_bytes);
}

/// Weights that cat() or stack() made of others, which are still there.
Found find_joined_weights(const ReasonFacts& facts) {
  const auto is_parameter = [](const LiveBlock& block) { return block.category == Category::parameter; };
  const Share joined =
      sum_blocks(facts, [&](const LiveBlock& block) { return is_parameter(block) && joins(block.made); });
  const Share others =
      sum_blocks(facts, [&](const LiveBlock& block) { return is_parameter(block) && !joins(block.made); });
  const bool asks = failure(facts) != nullptr && joins(failed_in(facts)) && failed_in(facts).module.empty();
  const int64_t bytes = joined.bytes + (asks ? requested_bytes(facts) : 0);
  if (joined.count < 2 || others.bytes < joined.bytes || !is_large(facts, bytes, 0.2)) return {};
  return Reason{
      .text = fmt::format("weights are joined to new ones{}, {}, while those that they are made of are still there: {}",
                          at(joined.made()), with_unit(bytes), with_unit(others.bytes)),
      .bytes = joined.bytes,
      .fix = "drop_models",
      .how = {"del layer.parts  # of each layer, as soon as its weights are joined; or join them on the host"}};
}

}  // namespace

Found find_weight_copies(const ReasonFacts& facts) {
  if (Found joined = find_joined_weights(facts)) return joined;
  const std::set<int64_t> weights = find_sizes_of_weights(facts);
  if (const Share clones = find_clones(facts); is_large(facts, clones.bytes)) {
    return Reason{
        .text = fmt::format("{} tensors are on the GPU twice: copies that were made{}, {}, beside the tensors "
                            "they are copies of",
                            clones.count, at(clones.made()), with_unit(clones.bytes)),
        .bytes = clones.bytes,
        .fix = "copies_on_host"};
  }
  const Share called = sum_blocks(
      facts, [](const LiveBlock& block) { return block.category == Category::parameter && !block.uncalled; });
  const bool has_called = called.count > 0;
  const Share copies =
      sum_blocks(facts, [&](const LiveBlock& block) { return is_kept_copy(block, weights, has_called); });
  const int64_t parameters = has_called ? called.bytes : sum_category(facts, Category::parameter).bytes;
  const bool goes_on = copies_weight(facts, weights);
  const int64_t bytes = copies.bytes + (goes_on ? requested_bytes(facts) : 0);
  if (copies.count < 2 || (!goes_on && bytes * 10 < parameters * 7)) return {};
  if (!is_large(facts, goes_on ? std::max(bytes, parameters) : bytes, 0.15)) return {};
  if (goes_on) {
    const Share moved = sum_blocks(facts, [&](const LiveBlock& block) {
      const bool is_of_called =
          block.category == Category::parameter && !block.uncalled;  // the model before, of the same line
      return is_same_call(block.made, failed_in(facts)) && !is_of_called;
    });
    if (copies.bytes * 2 < moved.bytes) return {};  // a model of other layers, some of which are as large
    return Reason{.text = fmt::format(
                      "another model of the same layers goes to the GPU{}, while the one before is still there: {} "
                      "beside {} of parameters",
                      at(failed_in(facts)), with_unit(bytes), with_unit(parameters)),
                  .bytes = bytes,
                  .fix = "drop_models",
                  .how = lines_for_next_model(facts, "goes to the GPU"),
                  .of_any_batch = true};
  }
  const bool is_model = copies.made().op == "aten::to" && !module_of(facts.referrers.find(*copies.largest)).empty();
  if (is_model) {  // and no copy of one: it was made on the host
    return Reason{
        .text = fmt::format("another model of the same layers is on the GPU{}, and none of its layers has been "
                            "called so far: {} beside {} of parameters",
                            at(copies.made()), with_unit(copies.bytes), with_unit(parameters)),
        .bytes = copies.bytes,
        .fix = "drop_models",
        .how = {"del model  # once it has served, before the next one goes to the GPU; or the next one stays on the "
                "host until it is called: model.cpu()"}};
  }
  return Reason{
      .text = fmt::format("another copy of the model's weights is kept on the GPU{}: {} beside {} of parameters",
                          at(copies.made()), with_unit(copies.bytes), with_unit(parameters)),
      .bytes = copies.bytes,
      .fix = "copies_on_host",
      .piles_up = true};
}

// The first weight of a state that goes to the GPU beside the model that has it. load_state_dict() copies by itself, from the host too.
Found find_copied_weight(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure_outside_of_layers(facts);
  if (failed == nullptr || !is_copy(failed->where.op) || !is_large(facts, failed->requested_bytes, 0.15)) return {};
  const Share as_large = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.category == Category::parameter && !block.uncalled && block.requested_bytes >= kDistinctBytes &&
           block.requested_bytes == failed->requested_bytes;
  });
  if (as_large.count == 0) return {};
  const Share parameters = sum_category(facts, Category::parameter);
  return Reason{
      .text = fmt::format("weights go to the GPU{} while the same are there: {} as large as {}, and the model "
                          "there has {} of parameters",
                          at(failed->where), with_unit(failed->requested_bytes), as_large.largest->name,
                          with_unit(parameters.bytes)),
      .bytes = failed->requested_bytes,
      .fix = "drop_models",
      .how = {"model.load_state_dict(state)  # of tensors of the host: it copies them into those that are there",
              "model.cpu()  # before another one, or its weights, go to the GPU"}};
}

namespace {

/// The outermost modules that made tensors in the step that failed or in the one before; of numbered ones the empty name.
std::set<std::string_view> list_called_modules(const ReasonFacts& facts) {
  std::set<std::string_view> modules;
  const auto add = [&](const StepAllocations& step) {
    for (const StepAllocation& block : step.blocks) {
      if (block.is_of_step() && !block.made.module.empty()) modules.insert(outermost_module(block.made.module));
    }
  };
  add(facts.device.step_allocations);
  add(facts.device.complete);
  return modules;
}

/// Weights of a layer that was called once, as it has a name.
bool is_weight(const LiveBlock& block) { return block.category == Category::parameter && contains(block.name, "."); }

/// Weights of layers that neither the step that failed nor the one before has called; nothing of a step that may yet call them.
Share find_uncalled_weights(const ReasonFacts& facts, Phase failed) {
  const bool has_pass =
      !facts.device.complete.blocks.empty() || failed == Phase::backward || failed == Phase::optimizer;
  const std::set<std::string_view> called = list_called_modules(facts);
  if (!has_pass || called.empty()) return {};
  return sum_blocks(facts, [&](const LiveBlock& block) {
    const std::string_view module = outermost_module(block.name);
    return is_weight(block) && !module.empty() && !called.contains(module);
  });
}

/// Weights of a model that no variable leads to, though one leads to those of another: what is left of it after `del model`.
Share find_deleted_weights(const ReasonFacts& facts) {
  std::set<std::string_view> referred;  // lines that made tensors which variables lead to
  for (const Referrer& one : facts.device.referrers) referred.insert(one.made.source);
  const auto is_of_other = [&](const LiveBlock& block) {
    return is_weight(block) && referred.contains(block.made.source);
  };
  if (sum_blocks(facts, is_of_other).count == 0) return {};
  return sum_blocks(facts, [&](const LiveBlock& block) {
    return is_weight(block) && !block.let_go && !block.made.source.empty() && !referred.contains(block.made.source);
  });
}

/// "72.00 MiB, as encoder.weight [1024, 1024] float32".
std::string name_share_of_model(const Share& share) {
  return fmt::format("{}, as {} {}", with_unit(share.bytes), share.largest->name, share.largest->shape);
}

}  // namespace

Found find_deleted_model(const ReasonFacts& facts) {
  constexpr size_t kMaxNames = 3;
  if (failure(facts) == nullptr || !facts.device.looked_for_referrers) return {};
  const Share left = find_deleted_weights(facts);
  if (left.largest == nullptr || !is_large(facts, left.bytes, 0.2) || !lets_request_through(facts, left.bytes))
    return {};
  std::vector<std::string> how;
  std::set<std::string_view> holders;
  for (const Referrer& one : facts.device.referrers) {
    if (one.nodes < kSeveralNodes || one.is_scalar() || holders.size() == kMaxNames) continue;
    if (holders.insert(one.variable).second)
      how.push_back(assign_each(as_written(variable_name(one.variable)),
                                [](const std::string& item) { return item + ".detach()"; }) +
                    "  # or made under torch.no_grad()");
  }
  if (how.empty()) return reference_cycle("a model's weights, " + name_share_of_model(left), left.bytes);
  return Reason{.text = fmt::format("no variable leads to the weights of a model any more, {}: graphs keep them, of {}",
                                    name_share_of_model(left), fmt::join(holders, " and ")),
                .bytes = left.bytes,
                .fix = "delete_outputs",
                .how = std::move(how)};
}

Found find_unused_weights(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || facts.device.sharded) return {};
  const Share unused = find_uncalled_weights(facts, failed->phase);
  if (unused.largest == nullptr || !is_large(facts, unused.bytes, 0.2)) return {};
  if (!lets_request_through(facts, unused.bytes)) return {};
  const Referrer* const referrer = facts.referrers.find(*unused.largest);
  const std::string_view model = module_of(referrer);
  return Reason{
      .text = fmt::format("weights that this step does not use are on the GPU: {}", name_share_of_model(unused)),
      .bytes = unused.bytes,
      .kept_by = variable_of(referrer),
      .fix = "drop_models",
      .how = {model.empty() ? std::string("model.cpu()  # or del model, once it has served")
                            : fmt::format("{0}.cpu()  # or del {0}, once it has served", model)}};
}

Found find_deep_copies(const ReasonFacts& facts) {
  if (!loads_weight(facts) || !failure(facts)->copies_deeply) return {};
  const int64_t bytes = find_tensors_of_files(facts).bytes + requested_bytes(facts);
  const std::vector<StackCall> calls = parse_stack(failure(facts)->stack);
  return Reason{
      .text = fmt::format("copy.deepcopy makes tensors as large as the weights beside them on the GPU{}: {}",
                          calls.empty() ? "" : fmt::format(" at {}", calls.front().short_place()), with_unit(bytes)),
      .bytes = bytes,
      .fix = "copies_on_host",
      .how = {kCopyOnHost, "# or none, where nothing reads it"},
      .piles_up = true};
}

Found find_loaded_in_the_way(const ReasonFacts& facts) {
  Share loaded = find_tensors_of_files(facts);
  if (loads_weight(facts)) {
    loaded.bytes += requested_bytes(facts);
    return names_loaded(facts, loaded, failure(facts)->stack);
  }
  if (!is_large(facts, loaded.bytes, 0.05) || !lets_request_through(facts, loaded.bytes)) return {};
  return names_loaded(facts, loaded);
}

Found find_loaded(const ReasonFacts& facts) {
  const Share loaded = find_tensors_of_files(facts);
  if (!is_large(facts, loaded.bytes, 0.25)) return {};
  return names_loaded(facts, loaded);
}

}  // namespace oomdiag
