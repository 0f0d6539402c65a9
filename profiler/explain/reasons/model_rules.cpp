#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "profiler/explain/facts/variable_counts.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/fold_indices.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"

// Rows of kReasons about several models that are alive at once.

namespace oomdiag {
namespace {

/// Of models that have parameters of the same names.
struct Twins {
  int64_t models = 0;
  int64_t bytes = 0;  ///< of all models, with gradients and optimizer state
  std::vector<const LiveBlock*> parameters{};
};

/// Parameters whose names are equal by `fold`; nullopt where they are little, or models are little of all.
template <class Fold>
std::optional<Twins> find_large_twins(const ReasonFacts& facts, Fold fold) {
  // By bytes: of a model that is gone no shape is known.
  std::map<std::pair<std::string, int64_t>, std::vector<const LiveBlock*>> names;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_inside = block.name.find('.') != block.name.npos;  // else it may be one of a list of layers
    if (block.category == Category::parameter && is_inside)
      names[{fold(block.name), block.requested_bytes}].push_back(&block);
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

std::optional<Twins> find_large_twins(const ReasonFacts& facts) {
  return find_large_twins(facts, [](std::string_view name) { return std::string(name); });
}

/// What variables lead to of the lines that made their parameters, which are few.
std::vector<Referrer> list_referrers(const ReasonFacts& facts, const Twins& twins) {
  std::vector<Where> made;
  for (const LiveBlock* block : twins.parameters) {
    if (std::ranges::find(made, block->made) == made.end()) made.push_back(block->made);
  }
  std::vector<Referrer> referrers;
  std::ranges::copy_if(facts.device.referrers, std::back_inserter(referrers),
                       [&](const Referrer& one) { return std::ranges::find(made, one.made) != made.end(); });
  return referrers;
}

/// Whether variables lead to the parameters of one of these models at most, though they were looked through: what an optimizer or a
/// list keeps a variable leads to.
bool are_unreachable(const ReasonFacts& facts, const Twins& twins) {
  if (!facts.device.looked_for_referrers) return false;
  const auto referred = std::ranges::count_if(list_referrers(facts, twins),
                                              [](const Referrer& one) { return !contains(one.variable, "._buffers"); });
  return referred * twins.models <= std::ssize(twins.parameters);
}

/// The variable of the one model whose layers these are, called one by one. Empty where there are several, or none is known.
std::string find_model_of_layers(const ReasonFacts& facts, const Twins& twins) {
  const std::vector<Referrer> referrers = list_referrers(facts, twins);
  VariableCounts models;
  for (const Referrer& one : referrers) {
    const std::string_view model = module_of(&one);
    if (!model.empty() && contains(variable_name(one.variable), "._modules[")) models.add(model, 1);
  }
  return models.count_of_most() * 5 >= std::ssize(twins.parameters) * 4 ? std::string(models.most()) : std::string();
}

/// "models" of "models[*]" and of `all_models["vgg11"]["optimizer"].state`, and of anything else nothing: an item of a list or a dict, or of
/// those that are items of it.
std::string_view list_of_item(std::string_view name) {
  const std::string_view item = name.substr(0, name.rfind(']') + 1);
  const size_t first = item.find('[');
  for (size_t at = first; at != item.npos && at < item.size(); at = item.find(']', at) + 1) {
    if (item[at] != '[') return {};
  }
  return first == item.npos ? std::string_view() : item.substr(0, first);
}

/// The list that has these models, or their optimizers, as items; or empty.
std::string find_list_of_models(const ReasonFacts& facts, const Twins& twins) {
  const std::vector<Referrer> referrers = list_referrers(facts, twins);
  VariableCounts lists;
  for (const Referrer& one : referrers) {
    const std::string_view model = module_of(&one), name = variable_name(one.variable);
    if (model.ends_with(']')) lists.add(list_of_item(model), 1);
    if (name.ends_with("].state")) lists.add(list_of_item(name), 1);
  }
  constexpr int64_t kPart = 5;  // to many of them their optimizer's state leads, whose keys they are
  return lists.count_of_most() * kPart >= std::ssize(twins.parameters) ? std::string(lists.most()) : std::string();
}

/// "trainer" of "dict 'trainer.model._parameters' in main" or of "dict 'trainer.optimizer.state'": the variable whose object has the model
/// of a parameter. Empty of an optimizer's own variable, and of a list.
std::string_view find_owner(const Referrer& parameter) {
  const std::string_view model = module_of(&parameter);
  if (!model.empty()) return model.find('[') == model.npos ? model.substr(0, model.find('.')) : std::string_view();
  const std::string_view name = variable_name(parameter.variable);
  const std::string_view attributes = name.substr(0, name.find('['));
  return std::ranges::count(attributes, '.') > 1 ? name.substr(0, name.find('.')) : std::string_view();
}

/// "variable 'old' in main (train.py:9)" for each variable that leads to one of these models, by itself or as an attribute of its object,
/// and none to the newest one, the oldest first.
std::vector<std::string> list_older_models(const ReasonFacts& facts, const Twins& twins) {
  struct Model {
    std::string name{};
    uint64_t newest = 0;  ///< of its parameters
    int64_t parameters = 0;
  };
  std::map<std::pair<std::string_view, std::string_view>, Model> models;
  for (const Referrer& one : list_referrers(facts, twins)) {
    const std::string_view variable = find_owner(one);
    const std::string_view place = one.variable.substr(std::min(one.variable.size(), one.variable.rfind(" in ")));
    if (variable.empty() || one.born == 0) continue;
    Model& model = models[{variable, place}];
    model.name = fmt::format("variable '{}'{}", variable, place);
    model.newest = std::max(model.newest, one.born);
    ++model.parameters;
  }
  const uint64_t newest = (*std::ranges::max_element(twins.parameters, {}, &LiveBlock::born))->born;
  std::vector<Model> older;
  for (auto& [key, model] : models) {
    const bool is_whole = model.parameters * twins.models * 2 >= std::ssize(twins.parameters);
    if (is_whole && model.newest < newest) older.push_back(std::move(model));
  }
  std::ranges::sort(older, {}, &Model::newest);
  std::vector<std::string> names;
  for (Model& model : older) names.push_back(std::move(model.name));
  return names;
}

/// Of a model that is still needed; `older` as of list_older_models(). On the host it is without its optimizer's state.
std::string line_for_needed_model(const ReasonFacts& facts, const std::vector<std::string>& older) {
  const bool has_states = sum_category(facts, Category::optimizer_state).count > 0;
  if (older.empty()) {
    return has_states ? "del model, optimizer  # of one that is still needed: model.cpu(), and no optimizer of it"
                      : "del model  # of one that is still needed: model.bfloat16(), or model.cpu() until then";
  }
  if (has_states) return "# of one that is still needed: model.cpu(), and no optimizer of it";
  return fmt::format("{}.cpu()  # until it is needed, if it still is; or .bfloat16()", variable_name(older.front()));
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

}  // namespace

Found find_several_models(const ReasonFacts& facts) {
  if (const std::optional<Twins> layers = find_large_twins(facts, fold_indices)) {
    const std::string model = find_model_of_layers(facts, *layers);
    if (Found stay = model.empty() ? Found() : layers_that_stay(facts, model, *layers)) return stay;
  }
  const std::optional<Twins> twins = find_large_twins(facts);
  if (!twins || !find_model_of_layers(facts, *twins).empty()) return {};
  const std::string list = find_list_of_models(facts, *twins);
  const std::vector<std::string> older = list.empty() ? list_older_models(facts, *twins) : std::vector<std::string>();
  std::vector<std::string> lines;
  for (const std::string& one : older)
    lines.push_back(
        fmt::format("del {}  # before the next model; and what refers to its parameters: its optimizer, "
                    "scheduler and trainer",
                    variable_name(one)));
  const std::vector<std::string> others = lines_for_models(facts, line_for_needed_model(facts, older));
  const bool is_dict = std::ranges::any_of(facts.device.referrers, [&](const Referrer& one) {
    return variable_name(one.variable).starts_with(list + "[\"");
  });
  if (!list.empty())
    lines.push_back(
        is_dict
            ? fmt::format("{}[key] = None  # of a model that has served: it has them all, and their optimizers", list)
            : fmt::format("{}.append(model.cpu())  # it has them all; and model.zero_grad(), whose gradients "
                          "stay on the GPU",
                          list));
  lines.insert(lines.end(), others.begin(), others.end());
  return Reason{
      .text = fmt::format(
          "{} models with layers of the same names are alive: {} of parameters, gradients and optimizer state",
          twins->models, with_unit(twins->bytes)),
      .bytes = twins->bytes - twins->bytes / twins->models,
      .kept_by = list.empty() ? fmt::format("{}", fmt::join(older, ", "))
                              : fmt::format("{} '{}'", is_dict ? "dict" : "list", list),
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
                         bytes, "training whose model has served");
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
      .how = lines_for_next_model(facts, "is made"),
      .of_any_batch = true};
}

}  // namespace oomdiag
