#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/step/known_rest.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons about what one model needs by itself: its weights, gradients and optimizer state, one large layer, or all of a step.

namespace oomdiag {
namespace {

/// "AdamW" of "AdamW, group 1".
std::string_view optimizer_of(const LiveBlock& block) { return block.group.substr(0, block.group.find(',')); }

}  // namespace

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
      .how = lines_for_next_model(facts, "goes to the GPU", moved->name)};
}

namespace {

/// The function of the program that only makes a file of a model, as export_onnx(): the innermost one whose name says so. Empty where
/// none does.
std::string find_conversion(const ReasonFacts& facts) {
  for (const StackCall& call : parse_stack(failure(facts)->stack)) {
    if (!is_of_package(call) &&
        contains_one_of(call.function, {"export", "convert", "quantiz", "merge_", "to_onnx", "save_"}))
      return std::string(call.function);
  }
  return {};
}

}  // namespace

Found find_weights_that_do_not_fit(const ReasonFacts& facts) {
  const std::optional<MovedModel> moved = find_moving(facts);
  if (!moved || !is_large(facts, moved->share.bytes, 0.5)) return {};
  const std::string_view type = parse_dtype(moved->share.largest->shape);
  std::vector<std::string> how;  // where its type is wide: the row's
  if (type != "float32" && type != "float64")
    how = {"from_pretrained(…, device_map=\"auto\")  # layers that do not fit stay on the host; or quantized weights"};
  if (const std::string conversion = find_conversion(facts); !conversion.empty()) {
    if (how.empty()) how = split_lines(find_fix("smaller_weights")->lines);
    how.insert(how.begin(),
               fmt::format("model.cpu()  # {}() can work on the host: a file of it is the same", conversion));
  }
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
    const bool is_new_weight = is_new && makes_weight(block.made) && block.made.module.empty() &&
                               (referrer == nullptr || !module_of(referrer).empty());
    if (is_new_weight) sizes.insert(block.requested_bytes);
    return is_new_weight;
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
