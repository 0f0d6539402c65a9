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
#include "profiler/explain/step/known_rest.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons about models themselves: several that are alive, copies of weights, files, and models that are too large.

namespace oomdiag {
namespace {

constexpr int64_t kDistinctBytes = 1 << 20;  ///< smaller tensors are of usual sizes

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

/// `stack`: of the request that failed, if that is one of them.
Reason names_loaded(const ReasonFacts& facts, const Share& loaded, std::string_view stack = {}) {
  const std::vector<StackCall> calls = parse_stack(stack);
  const std::string line = calls.empty() ? at(loaded.made()) : fmt::format(" at {}", calls.front().short_place());
  // Files are loaded before the first step, mostly. What a later one has made may be copies: these are made without an op, too.
  const Referrer* const referrer = loaded.largest == nullptr ? nullptr : facts.referrers.find(*loaded.largest);
  const bool is_called_so =
      referrer != nullptr && contains_one_of(referrer->variable, {"checkpoint", "ckpt", "resume"});
  const bool may_be_copies = loaded.largest != nullptr && loaded.largest->step > 1 && calls.empty() && !is_called_so;
  std::vector<std::string> lines{"state = torch.load(path, map_location=\"cpu\")" + comment_at(loaded.made()),
                                 "del state  # as soon as the model and the optimizer have it"};
  if (may_be_copies) lines.emplace_back(kCopyOnHost);
  return Reason{
      .text = may_be_copies
                  ? fmt::format("torch.load, or copy.deepcopy of a state dict, put tensors onto the "
                                "GPU in step {}: {}",
                                loaded.largest->step, with_unit(loaded.bytes))
                  : fmt::format("torch.load put tensors of a file onto the GPU{}: {}", line, with_unit(loaded.bytes)),
      .bytes = loaded.bytes,
      .kept_by = variable_of(referrer),
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

Share sum_models(const ReasonFacts& facts) { return sum_blocks(facts, is_of_called_models); }

/// Of models that have parameters of the same names.
struct Twins {
  int64_t models = 0;
  int64_t bytes = 0;  ///< of all models, with gradients and optimizer state
  std::vector<const LiveBlock*> parameters{};
};

/// nullopt where they are little, or models are little of all.
std::optional<Twins> find_large_twins(const ReasonFacts& facts) {
  // By bytes: of a model that is gone no shape is known.
  std::map<std::pair<std::string_view, int64_t>, std::vector<const LiveBlock*>> names;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_inside = block.name.find('.') != block.name.npos;  // else it may be one of a list of layers
    if (block.category == Category::parameter && is_inside)
      names[{block.name, block.requested_bytes}].push_back(&block);
  }
  Twins twins;
  int64_t parameters = 0;
  for (const auto& [name, blocks] : names) {
    if (blocks.size() < 2) continue;
    twins.models = std::max(twins.models, std::ssize(blocks));
    for (const LiveBlock* block : blocks) parameters += block->bytes;
    twins.parameters.insert(twins.parameters.end(), blocks.begin(), blocks.end());
  }
  twins.bytes = sum_models(facts).bytes;
  if (twins.models < 2 || !is_large(facts, parameters, 0.15) || !is_large(facts, twins.bytes, 0.5)) return {};
  return twins;
}

/// Where their parameters were made: few, as a line makes many.
std::vector<Where> list_makers(const Twins& twins) {
  std::vector<Where> made;
  for (const LiveBlock* block : twins.parameters) {
    if (std::ranges::find(made, block->made) == made.end()) made.push_back(block->made);
  }
  return made;
}

/// Whether variables lead to the parameters of one of these models at most, though they were looked through: what an optimizer or a
/// list keeps a variable leads to.
bool are_unreachable(const ReasonFacts& facts, const Twins& twins) {
  if (!facts.device.looked_for_referrers) return false;
  const std::vector<Where> made = list_makers(twins);
  const auto referred = std::ranges::count_if(facts.device.referrers, [&](const Referrer& one) {
    const bool is_buffer = contains(one.variable, "._buffers");
    return !is_buffer && std::ranges::find(made, one.made) != made.end();
  });
  return referred * twins.models <= std::ssize(twins.parameters);
}

/// The variable of the one model whose layers these are, called one by one: then they have no names of a model around them. Empty where
/// there are several, or none is known.
std::string find_model_of_layers(const ReasonFacts& facts, const Twins& twins) {
  const std::vector<Where> made = list_makers(twins);
  VariableCounts models;
  for (const Referrer& one : facts.device.referrers) {
    const std::string_view model = module_of(&one);
    const bool is_layer = !model.empty() && contains(variable_name(one.variable), "._modules[");
    if (is_layer && std::ranges::find(made, one.made) != made.end()) models.add(model, 1);
  }
  return models.count_of_most() * 5 >= std::ssize(twins.parameters) * 4 ? std::string(models.most()) : std::string();
}

/// The list that has these models as items, as "models" of "dict 'models[*]._parameters'"; or empty.
std::string find_list_of_models(const ReasonFacts& facts, const Twins& twins) {
  VariableCounts lists;
  for (const LiveBlock* block : twins.parameters) {
    const std::string_view model = module_of(facts.referrers.find(*block));
    const size_t item = model.find('[');
    if (item != model.npos && item > 0 && model.find(']') + 1 == model.size()) lists.add(model.substr(0, item), 1);
  }
  constexpr int64_t kPart = 5;  // to many of them their optimizer's state leads, whose keys they are
  return lists.count_of_most() * kPart >= std::ssize(twins.parameters) ? std::string(lists.most()) : std::string();
}

/// Of layers that went to the GPU one after another, as each was called: results of the first ones are older than the last ones.
Found layers_that_stay(const ReasonFacts& facts, const std::string& model, const Twins& twins) {
  const auto [first, last] = std::ranges::minmax(twins.parameters, {}, &LiveBlock::born);
  const bool are_apart =
      std::ranges::any_of(facts.device.state.blocks, [&, first = first, last = last](const LiveBlock& block) {
        return is_data(block) && !block.made.module.empty() && block.born > first->born && block.born < last->born;
      });
  if (!are_apart) return {};
  return Reason{.text = fmt::format("{} layers of {} went to the GPU one after another{}, and none went back: {}",
                                    twins.models, model, at(twins.parameters.front()->made), with_unit(twins.bytes)),
                .bytes = twins.bytes - twins.bytes / twins.models,
                .fix = "drop_models",
                .how = {"layer.cpu()  # when it has served, before the next one goes to the GPU"}};
}

/// Names a cache of function results, where a variable leads to these models by one.
std::vector<std::string> lines_for_models(const ReasonFacts& facts, const std::string& otherwise) {
  const auto cached = std::ranges::find_if(facts.device.referrers,
                                           [](const Referrer& one) { return contains(one.variable, kCacheOfResults); });
  std::vector<std::string> lines{otherwise};
  if (cached != facts.device.referrers.end()) {
    lines.insert(
        lines.begin(),
        fmt::format("{}.cache_clear()  # functools.lru_cache keeps what the function was given and returned: or "
                    "no cache",
                    variable_name(cached->variable)));
  }
  return lines;
}

/// The same before the next model of the same layers `comes`, as it "is made".
std::vector<std::string> lines_for_next_model(const ReasonFacts& facts, std::string_view comes) {
  return lines_for_models(facts,
                          fmt::format("del model, optimizer  # before the next one {}; of attributes: self.model = "
                                      "self.optimizer = None; to keep it: model.cpu()",
                                      comes));
}

/// "AdamW" of "AdamW, group 1".
std::string_view optimizer_of(const LiveBlock& block) { return block.group.substr(0, block.group.find(',')); }

}  // namespace

Found find_several_models(const ReasonFacts& facts) {
  const std::optional<Twins> twins = find_large_twins(facts);
  if (!twins) return {};
  if (const std::string model = find_model_of_layers(facts, *twins); !model.empty())
    return layers_that_stay(facts, model, *twins);
  std::vector<std::string> lines = lines_for_models(
      facts, "del model, optimizer  # of one that is still needed: model.bfloat16(), or model.cpu() until then");
  const std::string list = find_list_of_models(facts, *twins);
  if (!list.empty())
    lines.insert(lines.begin(),
                 fmt::format("{}.append(model.cpu())  # it has them all; and model.zero_grad(), whose gradients "
                             "stay on the GPU",
                             list));
  return Reason{
      .text = fmt::format("{} models of the same layers are alive: {} of parameters, gradients and optimizer state",
                          twins->models, with_unit(twins->bytes)),
      .bytes = twins->bytes - twins->bytes / twins->models,
      .kept_by = list.empty() ? "" : fmt::format("list '{}'", list),
      .fix = "drop_models",
      .how = std::move(lines),
      .piles_up = true};
}

Found find_models_in_cycles(const ReasonFacts& facts) {
  const std::optional<Twins> twins = find_large_twins(facts);
  if (!twins || !are_unreachable(facts, *twins)) return {};
  const int64_t bytes = twins->bytes - twins->bytes / twins->models;
  return reference_cycle(fmt::format("{} of {} models of the same layers, {} with gradients and optimizer state",
                                     twins->models - 1, twins->models, with_unit(bytes)),
                         bytes);
}

namespace {

/// Weights that cat() or stack() made of others, which are still there.
Found find_joined_weights(const ReasonFacts& facts) {
  const auto is_weight = [](const LiveBlock& block) { return block.category == Category::parameter; };
  const Share joined = sum_blocks(facts, [&](const LiveBlock& block) { return is_weight(block) && joins(block.made); });
  const Share others =
      sum_blocks(facts, [&](const LiveBlock& block) { return is_weight(block) && !joins(block.made); });
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
  if (copies.count < 2 || (!goes_on && bytes * 10 < parameters * 8)) return {};
  if (!is_large(facts, goes_on ? std::max(bytes, parameters) : bytes, 0.15)) return {};
  if (goes_on) {
    return Reason{.text = fmt::format(
                      "another model of the same layers goes to the GPU{}, while the one before is still there: {} "
                      "beside {} of parameters",
                      at(failed_in(facts)), with_unit(bytes), with_unit(parameters)),
                  .bytes = bytes,
                  .fix = "drop_models",
                  .how = lines_for_next_model(facts, "goes to the GPU")};
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

// Layer by layer on the GPU, at the lines that made those of the model before.
Found find_model_being_made(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure_outside_of_layers(facts);
  if (failed == nullptr || is_copy(failed->where.op)) return {};
  const Share of_line = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.category == Category::parameter && !block.uncalled && is_same_call(block.made, failed->where);
  });
  const Share parameters = sum_models(facts);
  if (failed->where.source.empty() || of_line.count < 2 || !is_large(facts, parameters.bytes, 0.2)) return {};
  return Reason{
      .text = fmt::format("another model of the same layers is made on the GPU{}, while the one before is still "
                          "there: {} of parameters, gradients and optimizer state",
                          at(failed->where), with_unit(parameters.bytes)),
      .bytes = parameters.bytes,
      .fix = "drop_models",
      .how = lines_for_next_model(facts, "is made")};
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

Found find_idle_model(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.module.empty()) return {};
  std::map<std::string_view, Share> models;
  std::set<std::string_view> called;  // models, and lines that made parameters of some: a layer may be called by itself
  for (const LiveBlock& block : facts.device.state.blocks) {
    const std::string_view model = block.pending_free ? std::string_view() : module_of(facts.referrers.find(block));
    const bool is_called = is_of_called_models(block) || block.category == Category::buffer || !block.saved_by.empty();
    if (is_called) called.insert({model, block.made.source});
    if (!is_called && !model.empty()) models[model].add(block);
  }
  std::erase_if(models, [&](const auto& entry) {
    return called.contains(entry.first) || called.contains(entry.second.made().source);
  });
  const auto most = std::ranges::max_element(models, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == models.end() || !is_large(facts, most->second.bytes, 0.2)) return {};
  const auto& [name, share] = *most;
  if (!lets_request_through(facts, share.bytes)) return {};
  return Reason{.text = fmt::format("{} went to the GPU{}, and none of its layers has been called so far: {}", name,
                                    at(share.made()), with_unit(share.bytes)),
                .bytes = share.bytes,
                .fix = "model_later",
                .how = {for_each_item(as_written(name), [](const std::string& item) {
                  return fmt::format("{0}.cuda()  # only before it is called; until then on the host: {0}.cpu()", item);
                })}};
}

namespace {

/// A model whose tensors go to the GPU one after the other, and the failing request with them.
struct MovedModel {
  std::string_view name{};  ///< its variable
  Share share{};            ///< what has come there so far
};

std::optional<MovedModel> find_moving(const ReasonFacts& facts) {
  const OutOfMemory* failed = failed_copy(facts);
  if (failed == nullptr) return {};
  std::map<std::string_view, Share> models;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_on_its_way = !block.pending_free && !is_of_called_models(block) && is_copy(block.made.op) &&
                               block.made.source == failed->where.source && block.made.module.empty();
    const std::string_view model = is_on_its_way ? module_of(facts.referrers.find(block)) : std::string_view();
    if (!model.empty()) models[model].add(block);
  }
  const auto most = std::ranges::max_element(models, {}, [](const auto& entry) { return entry.second.bytes; });
  return most == models.end() ? std::nullopt : std::optional(MovedModel{.name = most->first, .share = most->second});
}

}  // namespace

namespace {

/// A model that goes to the GPU by the same line as one of the same layers did before, neither of which has been called: their variables
/// alone tell them apart.
Found find_same_model_before(const ReasonFacts& facts) {
  constexpr size_t kFewestSizes = 2;
  const OutOfMemory* failed = failed_copy(facts);
  if (failed == nullptr) return {};
  struct Moved {
    int64_t bytes = 0;
    std::set<int64_t> sizes{};
  };
  std::map<std::string_view, Moved> models;
  for (const Referrer& one : facts.device.referrers) {
    const std::string_view model = module_of(&one);
    if (model.empty() || !is_copy(one.made.op) || one.made.source != failed->where.source) continue;
    models[model].bytes += one.storage_bytes;
    models[model].sizes.insert(one.storage_bytes);
  }
  if (models.size() != 2) return {};
  auto before = models.begin(), moved = std::next(before);
  if (moved->second.bytes > before->second.bytes) std::swap(before, moved);
  const bool is_same =
      moved->second.sizes.size() >= kFewestSizes && std::ranges::includes(before->second.sizes, moved->second.sizes);
  if (!is_same || !is_large(facts, before->second.bytes, 0.2)) return {};
  return Reason{.text = fmt::format(
                    "another model of the same layers goes to the GPU{}, while '{}' is still there: {} of it so far "
                    "beside {}",
                    at(failed->where), before->first, with_unit(moved->second.bytes), with_unit(before->second.bytes)),
                .bytes = before->second.bytes,
                .kept_by = std::string(before->first),
                .fix = "drop_models",
                .how = {fmt::format(
                    "{} = None  # and every other name of it, before the next one goes to the GPU; to keep it: .cpu()",
                    before->first)}};
}

}  // namespace

Found find_moved_model(const ReasonFacts& facts) {
  if (Found same = find_same_model_before(facts)) return same;
  const std::optional<MovedModel> moved = find_moving(facts);
  const Share others = sum_models(facts);
  if (!moved || !is_large(facts, others.bytes, 0.2)) return {};
  // One that is being trained is needed again.
  if (sum_category(facts, Category::optimizer_state).bytes > 0) {
    return Reason{
        .text =
            fmt::format("another model goes to the GPU{}, '{}', beside the one in training: {} of it so far beside {} "
                        "of parameters, gradients and optimizer state",
                        at(failed_in(facts)), moved->name, with_unit(moved->share.bytes), with_unit(others.bytes)),
        .bytes = moved->share.bytes + requested_bytes(facts),
        .fix = "model_on_host",
        .how = {
            "y = other(x).cpu()  # once, before the model in training is there, if what it makes is the same each time",
            "other.cpu()  # it runs on the host, or the model in training goes there meanwhile: model.cpu()"}};
  }
  return Reason{
      .text = fmt::format("another model goes to the GPU{}, '{}', while the one before is still there: {} of it so "
                          "far beside {} of parameters, gradients and optimizer state",
                          at(failed_in(facts)), moved->name, with_unit(moved->share.bytes), with_unit(others.bytes)),
      .bytes = others.bytes,
      .fix = "drop_models",
      .how = {"self.model = None  # and every other name of it, before the next one goes to the GPU; to keep it: "
              "model.cpu()"}};
}

Found find_weights_that_do_not_fit(const ReasonFacts& facts) {
  const std::optional<MovedModel> moved = find_moving(facts);
  if (!moved || !is_large(facts, moved->share.bytes, 0.5)) return {};
  const std::string_view type = parse_dtype(moved->share.largest->shape);
  std::vector<std::string> how;  // where its type is wide: the row's
  if (type != "float32" && type != "float64")
    how = {"from_pretrained(…, device_map=\"auto\")  # layers that do not fit stay on the host; or quantized weights"};
  return Reason{
      .text = fmt::format("the weights alone do not fit: {} of '{}' have come to the GPU{}{}, and more are to come",
                          with_unit(moved->share.bytes), moved->name, at(failed_in(facts)),
                          type.empty() ? "" : fmt::format(", as {}", type)),
      .bytes = (moved->share.bytes + requested_bytes(facts)) / 2,
      .fix = "smaller_weights",
      .how = std::move(how)};
}

namespace {

/// As layers make their weights, and functions other tensors that are filled later.
bool makes_weight(const Where& where) {
  return makes_values(where) || is_one_of(where.op, {"aten::empty_strided", "aten::rand", "aten::randn"});
}

}  // namespace

// Under torch.device("cuda") layers make their weights on the GPU, before anything has called them: __init__() asks for the next one.
Found find_weights_being_made(const ReasonFacts& facts) {
  constexpr int64_t kManyWeights = 8;
  constexpr size_t kSeveralSizes = 2;  // others are buffers for data
  const OutOfMemory* failed = failure_outside_of_layers(facts);
  if (failed == nullptr || !makes_weight(failed->where)) return {};
  const std::vector<StackCall> calls = parse_stack(failed->stack);
  // A <listcomp> is none.
  const auto is_function = [](const StackCall& call) { return !call.function.starts_with('<'); };
  const auto maker = std::ranges::find_if(calls, is_function);
  if (maker == calls.end() || maker->function != "__init__") return {};
  std::set<int64_t> sizes;
  const Share made = sum_blocks(facts, [&](const LiveBlock& block) {
    const Referrer* const referrer = facts.referrers.find(block);
    const bool is_new =
        block.category == Category::unknown || (block.category == Category::parameter && block.uncalled);
    const bool is_weight = is_new && makes_weight(block.made) && block.made.module.empty() &&
                           (referrer == nullptr || !module_of(referrer).empty());
    if (is_weight) sizes.insert(block.requested_bytes);
    return is_weight;
  });
  if (made.count < kManyWeights || sizes.size() < kSeveralSizes || !is_large(facts, made.bytes, 0.5)) return {};
  return Reason{.text = fmt::format("the weights alone do not fit: {} of a model have been made on the GPU{}, and more "
                                    "are to come",
                                    with_unit(made.bytes), at(failed->where)),
                .bytes = (made.bytes + requested_bytes(facts)) / 2,
                .fix = "smaller_weights",
                .how = {"torch.set_default_dtype(torch.bfloat16)  # before the model is made, if it is float32 so far; "
                        "from_pretrained(…, dtype=torch.bfloat16)",
                        "from_pretrained(…, device_map=\"auto\")  # layers that do not fit stay on the host; or "
                        "quantized weights"}};
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
  constexpr size_t kMostNames = 3;
  if (failure(facts) == nullptr || !facts.device.looked_for_referrers) return {};
  const Share left = find_deleted_weights(facts);
  if (left.largest == nullptr || !is_large(facts, left.bytes, 0.2) || !lets_request_through(facts, left.bytes))
    return {};
  std::vector<std::string> how;
  std::set<std::string_view> holders;
  for (const Referrer& one : facts.device.referrers) {
    if (one.nodes < kSeveralNodes || one.is_scalar() || holders.size() == kMostNames) continue;
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

// Of a layer behind nn.Flatten, whose inputs are all positions of all channels.
Found find_large_layer(const ReasonFacts& facts) {
  constexpr int64_t kMany = 16384;
  const LiveBlock* weight = sum_category(facts, Category::parameter).largest;
  if (weight == nullptr) return {};
  const std::vector<int64_t> shape = parse_shape(weight->shape);
  if (shape.size() != 2) return {};
  const auto [narrow, wide] = std::minmax(shape[0], shape[1]);
  if (wide < kMany || wide < 4 * narrow) return {};
  const Share alike = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.category != Category::buffer && block.requested_bytes == weight->requested_bytes;
  });
  const bool asks = is_of_as_many(requested_bytes(facts), weight->requested_bytes);
  const int64_t bytes = alike.bytes + (asks ? requested_bytes(facts) : 0);
  if (!is_large(facts, bytes, 0.5)) return {};
  return Reason{
      .text = fmt::format("one layer has most of the parameters: {} {}, {}, and as much for its gradient and "
                          "for each moment of the optimizer",
                          weight->name.empty() ? "a weight" : weight->name, weight->shape, with_unit(weight->bytes)),
      .bytes = bytes,
      .fix = "smaller_layer",
      .how = wide == shape[1] ? std::vector<std::string>()
                              : std::vector<std::string>{"# fewer outputs: a vocabulary of frequent values alone, an "
                                                         "embedding of them, or columns with few values"}};
}

// requires_grad is true of every parameter that nobody sets it for, also of those that no optimizer was given.
Found find_gradients_of_frozen(const ReasonFacts& facts) {
  const Share trained =
      sum_blocks(facts, [](const LiveBlock& block) { return block.category == Category::parameter && block.trained; });
  const Share gradients = sum_category(facts, Category::gradient);
  const int64_t needless = gradients.bytes - trained.bytes;
  if (trained.count == 0 || facts.device.sharded || needless < trained.bytes || !is_large(facts, needless, 0.15))
    return {};
  return Reason{.text = fmt::format("parameters that no optimizer trains have gradients: {} for {} that are trained",
                                    with_unit(gradients.bytes), with_unit(trained.bytes)),
                .bytes = needless,
                .kept_by = keeper_of_gradients(gradients),
                .fix = "freeze_the_rest",
                .how = {"for p in model.parameters(): p.requires_grad_(False)  # before those that are trained: "
                        "requires_grad_(True)"}};
}

// An optimizer makes its state in one step. So where all parameters of a shape had theirs already, and more is made, another optimizer
// does that.
Found find_earlier_optimizer(const ReasonFacts& facts) {
  constexpr int64_t kStatesOfAdam = 2;
  struct Count {
    int64_t parameters = 0, states = 0;
    uint32_t first_step = ~uint32_t{0}, last_step = 0;
    const LiveBlock* earliest = nullptr;
  };
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr) return {};
  std::map<int64_t, Count> sizes;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.pending_free || block.requested_bytes < kDistinctBytes) continue;
    Count& count = sizes[block.requested_bytes];
    count.parameters += block.category == Category::parameter ? 1 : 0;
    if (block.category != Category::optimizer_state) continue;
    ++count.states;
    if (block.step < count.first_step) count.earliest = &block;
    count.first_step = std::min(count.first_step, block.step);
    count.last_step = std::max(count.last_step, block.step);
  }
  if (failed->phase == Phase::optimizer) {
    if (const auto asked = sizes.find(failed->requested_bytes); asked != sizes.end()) {
      ++asked->second.states;
      asked->second.last_step = failed->step;
    }
  }
  uint32_t now = 0;  // in which the other one began
  const LiveBlock* earliest = nullptr;
  for (const auto& [bytes, count] : sizes) {
    const bool are_too_many = count.parameters > 0 && count.states > kStatesOfAdam * count.parameters;
    if (!are_too_many || count.first_step >= count.last_step) continue;
    now = std::max(now, count.last_step);
    earliest = count.earliest;
  }
  if (earliest == nullptr) return {};
  const Share earlier = sum_blocks(
      facts, [&](const LiveBlock& block) { return block.category == Category::optimizer_state && block.step < now; });
  if (!is_large(facts, earlier.bytes, 0.15)) return {};
  const Referrer* const referrer = facts.referrers.find(*earliest);
  const std::string_view name = referrer == nullptr ? "" : container_name(referrer->variable);
  return Reason{
      .text = fmt::format("the state of an optimizer of before is still there beside that of a new one: {}",
                          with_unit(earlier.bytes)),
      .bytes = earlier.bytes,
      .kept_by = variable_of(referrer),
      .fix = "one_optimizer",
      .how = {fmt::format("{} = None  # before the next optimizer is made", name.empty() ? "optimizer" : name)}};
}

namespace {

/// "; most of the parameters are of 'visual_encoder', 61.10 MiB, which is trained": of the module at the top that has so much.
std::string describe_largest_part(const ReasonFacts& facts, int64_t parameters) {
  constexpr double kMost = 0.6;
  std::map<std::string_view, int64_t> parts, trained;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.category != Category::parameter || block.name.empty()) continue;
    const std::string_view part = block.name.substr(0, block.name.find('.'));
    parts[part] += block.bytes;
    if (block.trained) trained[part] += block.bytes;
  }
  const auto most = std::ranges::max_element(parts, {}, [](const auto& part) { return part.second; });
  if (parts.size() < 2 || static_cast<double>(most->second) < kMost * static_cast<double>(parameters)) return {};
  return fmt::format("; most of the parameters are of '{}', {}{}", most->first, with_unit(most->second),
                     trained[most->first] * 2 > most->second ? ", which is trained" : "");
}

/// "variable 'x' in forward (gcn.py:9), [100000, 100] float32": the largest of the program's whose shape is known, of those that a layer
/// works on if there are such; or empty.
std::string describe_largest_data(const ReasonFacts& facts) {
  const auto is_shown = [&](const LiveBlock& block) {
    return is_data(block) && block.made.module.empty() && !block.shape.empty() &&
           facts.referrers.find(block) != nullptr;
  };
  const auto is_of_layer = [&](const LiveBlock& block) {
    return is_shown(block) &&
           std::ranges::any_of(block.saved_by, [](const Where& node) { return !node.module.empty(); });
  };
  const LiveBlock* largest = sum_blocks(facts, is_of_layer).largest;
  if (largest == nullptr) largest = sum_blocks(facts, is_shown).largest;
  return largest == nullptr ? "" : std::string(facts.referrers.find(*largest)->variable) + comma_shape(*largest);
}

std::string describe_model_and_data(const ReasonFacts& facts, int64_t parameters, int64_t of_step) {
  const int64_t gradients = sum_category(facts, Category::gradient).bytes,
                states = sum_category(facts, Category::optimizer_state).bytes;
  const std::string learned =
      !trains(facts) ? ""
      : gradients + states == 0
          ? ", which get gradients and the optimizer's state in this step"
          : fmt::format(", {} of gradients and {} of the optimizer's state", with_unit(gradients), with_unit(states));
  return fmt::format("the model and its data together: {} of parameters{}, and {} of data and what layers make of it{}",
                     with_unit(parameters), learned, with_unit(of_step), describe_largest_part(facts, parameters));
}

}  // namespace

// What is left to say where no kind of tensor has most of it.
Found find_whole_step(const ReasonFacts& facts) {
  constexpr double kMostOfAll = 0.5, kMostOfData = 0.85;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->where.module.empty()) return {};
  const Share models = sum_blocks(facts, [](const LiveBlock& block) { return is_of_models(block.category); });
  const int64_t of_step = sum_blocks(facts, is_data).bytes + failed->requested_bytes;
  if (!is_large(facts, models.bytes + of_step, kMostOfAll)) return {};
  const std::string data = describe_largest_data(facts);
  if (!data.empty() && is_large(facts, of_step, kMostOfData)) {
    return Reason{.text = fmt::format("one step works on all of {} at once: {} of data and what layers make of it",
                                      data, with_unit(of_step))};
  }
  Reason reason{.text = describe_model_and_data(facts, sum_category(facts, Category::parameter).bytes, of_step)};
  if (!trains(facts) && wants_gradient_of_data(facts)) {  // an attribution, say
    reason.fix = "split_batch";
    reason.bytes = of_step / 4 * 3;
    reason.how = {kGradientsOfParts};
  }
  return reason;
}

// Of a step that was never whole; later it is known what it takes.
Found find_states_that_do_not_fit(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  const MemoryState& state = facts.device.state;
  const bool is_first = failed != nullptr && failed->phase != Phase::setup && facts.device.complete.blocks.empty();
  if (!is_first || facts.device.sharded) return {};
  const auto trained = std::ranges::find(state.blocks, true, &LiveBlock::trained);
  if (trained == state.blocks.end() || least_state(trained->group) == 0) return {};
  const KnownRest rest = add_known_rest(facts.device.step_allocations, state);
  const int64_t parameters = sum_category(facts, Category::parameter).bytes,
                gradients = sum_category(facts, Category::gradient).bytes + rest.gradient_bytes,
                states = sum_category(facts, Category::optimizer_state).bytes + rest.state_bytes;
  const int64_t bytes = parameters + gradients + states;
  if (bytes <= state.free_bytes + state.reserved_bytes) return {};
  return Reason{
      .text = fmt::format("whatever the batch, the model itself takes {} in its first step: {} of parameters, "
                          "{} of gradients and {} of {}'s state",
                          with_unit(bytes), with_unit(parameters), with_unit(gradients), with_unit(states),
                          optimizer_of(*trained)),
      .bytes = bytes / 2,
      .kept_by = "parameters, their .grad, and the optimizer",
      .fix = "smaller_states"};
}

Found find_model_states(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr) return {};
  // What backward has made of a weight's size and not yet added to a gradient is one, too.
  const std::set<int64_t> weights = find_sizes_of_weights(facts);
  const Share gradients = sum_blocks(facts, [&](const LiveBlock& block) {
    return block.category == Category::gradient ||
           (block.category == Category::activation_gradient && weights.contains(block.requested_bytes));
  });
  const Share parameters = sum_category(facts, Category::parameter),
              states = sum_category(facts, Category::optimizer_state);
  const Share all{.bytes = parameters.bytes + gradients.bytes + states.bytes};
  const bool is_of_weight = failed->phase == Phase::backward && weights.contains(failed->requested_bytes);
  const int64_t asks = failed->phase == Phase::optimizer || is_of_weight ? failed->requested_bytes : 0;
  const auto trained = std::ranges::find(facts.device.state.blocks, true, &LiveBlock::trained);
  if (trained == facts.device.state.blocks.end() || !is_large(facts, all.bytes + asks, 0.75)) return {};
  const std::string_view optimizer = optimizer_of(*trained);
  const LiveBlock* const weight = parameters.largest;
  const bool is_notable = weight != nullptr && !weight->name.empty() && weight->bytes * 4 >= parameters.bytes;
  const std::string largest =
      is_notable ? fmt::format(" (the largest {} {}, {})", weight->name, weight->shape, with_unit(weight->bytes)) : "";
  return Reason{
      .text = fmt::format("the model itself: {} of parameters{}, {} of gradients and {} of {} state so far",
                          with_unit(parameters.bytes), largest, with_unit(gradients.bytes), with_unit(states.bytes),
                          optimizer.empty() ? "the optimizer's" : std::string(optimizer) + "'s"),
      .bytes = all.bytes + asks};
}

}  // namespace oomdiag
