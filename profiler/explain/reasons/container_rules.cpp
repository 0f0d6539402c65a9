#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/growth_evidence.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/fold_indices.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"

// Rows of kReasons about tensors that lists, dicts and attributes keep, step after step or one turn of a loop after the other.

namespace oomdiag {
// jacobian() and hessian() run backward for each output of the function, and keep the rows in lists until all are there.
Found find_whole_jacobian(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  const std::string_view file = "(torch/autograd/functional.py:";
  if (growth == nullptr || !contains(growth->referrer, file)) return {};
  const std::string function(function_of(growth->referrer));
  return Reason{.text = fmt::format(
                    "{}() computes the derivative of each output, and keeps all of them: {} for one, as large "
                    "as what it is with respect to, {} so far{}",
                    function, with_unit(growth->bytes_per_step), with_unit(growth->grown_bytes), at(growth->held)),
                .bytes = growth->grown_bytes,
                .kept_by = growth->referrer,
                .fix = "parts_of_jacobian"};
}

Found find_few_kept_tensors(const ReasonFacts& facts) {
  const uint32_t now = facts.device.state.step;
  if (failure(facts) == nullptr || now < 2 || leading_growth(facts) != nullptr) return {};
  std::map<std::string, Share> kept;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_earlier = block.step > 0 && block.step < now && block.phase != Phase::setup;
    if (!is_earlier || block.pending_free || is_of_models(block.category) || !block.name.empty()) continue;
    const Referrer* referrer = facts.referrers.find(block);
    // A variable has its tensor until it is assigned again: see find_earlier_outputs.
    if (referrer == nullptr || referrer->variable.starts_with("variable ") || !module_of(referrer).empty()) continue;
    kept[fold_subscripts(referrer->variable)].add(block);
  }
  int64_t bytes = 0;
  for (const auto& [variable, share] : kept) bytes += share.bytes;
  const auto most = std::ranges::max_element(kept, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == kept.end() || !is_large(facts, bytes)) return {};
  const auto& [variable, share] = *most;
  const bool is_closure = variable.starts_with("function ");
  const bool is_replaced = variable.starts_with("attribute ") || variable.starts_with("tuple ");
  return Reason{
      .text = fmt::format("{}{} keeps tensors of earlier steps{}: {}", variable,
                          kept.size() > 1 ? " and others like it" : "", at(share.made()), with_unit(bytes)),
      .bytes = bytes,
      .fix = "results_to_host",
      .how = {
          is_closure
              ? "gc.collect()  # after each step: a function keeps what it uses of those around it, and a class itself"
          : is_replaced ? assign_each(as_written(variable_name(variable)), [](const std::string&) { return "None"; }) +
                              "  # when it has served; or .cpu()"
                        : line_for_kept(variable, false)}};
}

namespace {

struct Collected {
  std::string variable{};  ///< the container, numbers of its items folded
  std::string name{};      ///< as the program writes it
  Share share{};
  std::vector<std::string> beside{};  ///< names of others that the same loop fills, whose tensors are of `share`, too
};

/// Whether the line that failed is that which made it: a loop that fills a container runs out.
bool is_being_filled(const ReasonFacts& facts, const LiveBlock& block) {
  const OutOfMemory* const failed = failure_outside_of_layers(facts);
  return failed != nullptr && is_same_call(failed->where, block.made);
}

/// Tensors by the name of the container that keeps them; nothing where growth is known, which says more.
std::map<std::string_view, Share> list_containers(const ReasonFacts& facts) {
  if (leading_growth(facts) != nullptr) return {};
  const std::set<int64_t> weights = find_sizes_of_weights(facts);
  std::map<std::string_view, Share> held;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.pending_free || is_of_models(block.category) || block.made.source.empty()) continue;
    const Referrer* referrer = facts.referrers.find(block);
    if (referrer == nullptr || !is_container(fold_subscripts(referrer->variable)) || !module_of(referrer).empty())
      continue;
    const bool is_list = is_appended_to(referrer->variable);
    const bool may_be_data = (block.phase == Phase::setup && !is_being_filled(facts, block)) ||
                             weights.contains(block.requested_bytes) || is_copy(block.made.op);
    if (!is_list && may_be_data) continue;
    held[container_name(referrer->variable)].add(block);
  }
  return held;
}

/// The container that has most, if these are many tensors.
std::optional<Collected> find_collection(const ReasonFacts& facts, const std::map<std::string_view, Share>& held) {
  constexpr int64_t kMany = 8;
  const auto most = std::ranges::max_element(held, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == held.end() || most->second.count < kMany) return {};
  const auto& [name, share] = *most;
  const std::string_view one = facts.referrers.find(*share.largest)->variable;
  return Collected{.variable = fold_subscripts(one),
                   .name = std::string(is_appended_to(one) ? variable_name(one) : name),
                   .share = share};
}

/// With those of other containers that the same loop fills. One that was interrupted has filled some once more than the others.
void add_filled_beside(const std::map<std::string_view, Share>& held, Collected& found) {
  const int64_t count = found.share.count;
  const std::string_view name = container_name(found.variable);
  for (const auto& [other, of_other] : held) {
    if (other == name || std::abs(of_other.count - count) > 1) continue;
    found.beside.emplace_back(other);
    found.share.bytes += of_other.bytes;
    found.share.count += of_other.count;
  }
}

/// Whether a loop over batches fills it, without a graph: half of each batch would leave as much behind.
bool is_filled_by_batches(const ReasonFacts& facts, const Collected& found) {
  if (builds_graph(facts).value_or(false)) return false;
  std::set<uint32_t> steps;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.made == found.share.made()) steps.insert(block.step);
  }
  std::map<std::string_view, int64_t> batches;  // that went to the GPU in the step, by line
  for (const StepAllocation& block : facts.device.step_allocations.blocks) {
    if (block.is_of_step() && block.made.module.empty() && is_copy(block.made.op)) ++batches[block.made.source];
  }
  return steps.size() > 1 ||
         std::ranges::any_of(batches, [&](const auto& line) { return line.second * 2 >= found.share.count; });
}

/// A container of tensors that were made before the first step, to be filled: a cache, say.
Reason made_in_advance(const Collected& found) {
  return Reason{.text = fmt::format("{} has {} tensors that were made in advance{}, to be filled: {}", found.variable,
                                    found.share.count, at(found.share.made()), with_unit(found.share.bytes)),
                .bytes = found.share.bytes / 2,
                .fix = "smaller_cache",
                .how = {"# smaller ones, here half: beside them the largest step has to fit, as the longest prompt; or "
                        "that in parts"}};
}

/// Whether the program optimizes its data, as an image, and no weight: what layers made of other data is kept for no backward pass.
bool trains_data_alone(const ReasonFacts& facts) {
  const auto is_trained_weight = [](const LiveBlock& block) {
    return block.category == Category::parameter && block.trained && !block.name.empty();
  };
  return (wants_gradient_of_data(facts) || trains(facts)) &&
         std::ranges::none_of(facts.device.state.blocks, is_trained_weight);
}

/// What a layer has as an attribute is a result of its own, which the next op reads on the GPU; and a list that it has a hook fills.
std::string line_for_collected(std::string_view variable, std::string_view name, const Where& made) {
  const bool is_of_layer = contains(variable, "_modules[");
  if (variable.starts_with("attribute ")) {
    const std::string attribute = as_written(variable_name(variable));
    if (!is_of_layer) {
      return fmt::format("{}  # as each is made{}; or no such attribute, where nothing reads it later",
                         assign_each(attribute, [](const std::string& item) { return item + ".cpu()"; }), at(made));
    }
    return assign_each(attribute, [](const std::string&) { return "None"; }) +
           "  # once it has served, in forward(): there a local variable does";
  }
  if (is_appended_to(variable) && is_of_layer) {
    constexpr std::string_view kWhen = "  # after each pass that nothing reads it for: it is filled in each";
    const std::string_view list = name.substr(name.rfind('.') + 1);
    const bool is_of_many = contains(variable, "[*]") && list != name;
    return is_of_many ? fmt::format("for m in model.modules(): getattr(m, \"{}\", []).clear(){}", list, kWhen)
                      : fmt::format("{}.clear(){}", name, kWhen);
  }
  return fmt::format("{}  # each tensor of it; or of each only what is used: topk, a mean, an index",
                     is_appended_to(variable) ? fmt::format("{}.append(output.cpu())", name)
                                              : fmt::format("{}[…] = output.cpu()", name));
}

/// Those of a container that has at least this part of all.
Found name_collected(const ReasonFacts& facts, double part) {
  const std::map<std::string_view, Share> held = list_containers(facts);
  std::optional<Collected> found = find_collection(facts, held);
  if (found) add_filled_beside(held, *found);
  if (!found || !is_large(facts, found->share.bytes, part)) return {};
  const auto& [variable, name, share, beside] = *found;
  const bool is_data = share.largest->category == Category::input && is_copy(share.made().op);
  if (is_data && share.largest->step == 0) return {};        // no results: batches that were moved before the loop
  const bool is_idle = builds_graph(facts).value_or(false);  // a training step fills no cache
  const bool is_in_advance = makes_values(share.made()) && share.largest->step == 0 && !is_idle;
  if (is_in_advance && !is_being_filled(facts, *share.largest)) return made_in_advance(*found);
  const bool is_of_step = failure(facts) == nullptr || share.largest->step == failure(facts)->step;
  if (const std::string hook = line_for_hook(variable); !hook.empty()) {
    return Reason{.text = fmt::format("a hook of a module fills {}, {} results{}: {}", variable, share.count,
                                      at(share.made()), with_unit(share.bytes)),
                  .bytes = share.bytes,
                  .fix = "results_to_host",
                  .how = {hook},
                  .piles_up = true,
                  .of_any_batch = true};
  }
  std::vector<std::string> how{line_for_collected(variable, name, share.made())};
  if (is_appended_to(variable)) {
    for (const std::string& other : beside) how.push_back(fmt::format("{}.append(output.cpu())", other));
  }
  const bool fills_in_one_pass = is_of_step && is_appended_to(variable) && contains(variable, "_modules[");
  if (fills_in_one_pass)
    how.insert(
        how.begin(),
        fmt::format("self.{}.append(x.cpu())  # in the layer; or no append, where nothing reads it: one pass fills it",
                    name.substr(name.rfind('.') + 1)));
  const bool is_of_graph = share.largest->category == Category::activation && trains_data_alone(facts);
  if (is_of_graph)
    how.insert(how.begin(),
               fmt::format("with torch.no_grad():  # around what fills {}: nothing trains these weights, and their "
                           "graph is kept with it",
                           name));
  // What layers keep in training, as for gradients of each sample.
  const OutOfMemory* const failed = failure(facts);
  const bool trains_without_graph =
      failed != nullptr && failed->no_grad && !failed->modules_evaluate && facts.device.attribution.backward_bytes > 0;
  if (trains_without_graph && contains(variable, "_modules["))
    how.insert(how.begin(),
               "model.eval()  # before a pass that nothing learns from: what fills it may ask for layer.training");
  const bool is_cache = contains(name, "cache") || contains(name, "past_key");
  if (is_cache && builds_graph(facts).value_or(learns(facts)))
    how.insert(how.begin(),
               "model.config.use_cache = False  # in training nothing reads the keys and values of before");
  // Of a variable that the loop assigns anew with what the next step makes.
  const bool is_of_step_before =
      !is_of_step && !is_appended_to(variable) && share.largest->step + 1 == failure(facts)->step;
  if (is_of_step_before) {
    how.insert(how.begin(),
               fmt::format("del {}  # at the end of each turn: it has them while the next step runs", name));
  } else if (!is_of_step) {
    const std::string_view object = object_of(name);
    how.insert(how.begin(), fmt::format("{}.clear()  # once they have served: an earlier step made them{}", name,
                                        object.empty() ? "" : fmt::format("; of a metric: {}.reset()", object)));
  }
  return Reason{
      .text = fmt::format("{}{} {} results{}{}: {}", variable,
                          beside.empty() ? " keeps" : fmt::format(" and {} keep", fmt::join(beside, ", ")), share.count,
                          is_of_graph         ? ", its own and those of the graph behind them,"
                          : is_of_step_before ? " of the step before"
                                              : "",
                          at(share.made()), with_unit(share.bytes)),
      .bytes = share.bytes,
      .fix = "results_to_host",
      .how = std::move(how),
      .piles_up = true,
      .of_any_batch = is_filled_by_batches(facts, *found)};
}

struct Items {
  int64_t bytes = 0;
  int64_t count = 0;
  Where made{};  ///< one of them
};

/// Tensors that containers keep, each under its own name, whatever made them: data that a loop moved to the GPU are joined like results.
std::map<std::string, Items> list_items(const ReasonFacts& facts) {
  std::map<std::string, Items> items;
  for (const Referrer& one : facts.device.referrers) {
    const std::string variable = fold_subscripts(one.variable);
    if (one.born == 0 || !is_container(variable) || !module_of(&one).empty()) continue;
    Items& of_container = items[variable];
    of_container.bytes += one.storage_bytes;
    ++of_container.count;
    of_container.made = one.made;
  }
  return items;
}

/// Parts in a container, where no step ends between them.
Found find_joined_collection(const ReasonFacts& facts) {
  if (!joins(failed_in(facts)) || leading_growth(facts) != nullptr) return {};
  const std::map<std::string, Items> items = list_items(facts);
  const auto requested = static_cast<double>(requested_bytes(facts));
  const auto parts = std::ranges::find_if(items, [&](const auto& entry) {
    const auto bytes = static_cast<double>(entry.second.bytes);
    return entry.second.count > 1 && bytes >= 0.8 * requested && 0.8 * bytes <= requested;
  });
  if (parts == items.end() || !is_large(facts, parts->second.bytes + requested_bytes(facts), 0.4)) return {};
  const auto& [variable, joined] = *parts;
  const std::string name = as_written(variable_name(variable));
  std::vector<std::string> how;
  if (is_appended_to(variable)) {
    how = {fmt::format("{}.append(part.gather(1, index))  # of each only what is used later: a chosen value, a sum, a "
                       "mean",
                       name),
           "out[i] = part  # into out = torch.empty(…) as each is made, or out += part: no list beside what is made "
           "of it",
           fmt::format("{}.append(part.cpu())  # and what reads them on the host, too", name)};
  } else {
    how = {assign_each(name, [](const std::string& item) { return item + ".cpu()"; }) +
               "  # as each is made: joined on the host, and read in parts",
           "# or of each part only what is used later, computed as it is made: a sum, a mean, a chosen value"};
  }
  return Reason{.text = fmt::format("{}{} joins the {} tensors of {}{}: {} more, while all of them are still there",
                                    failed_in(facts).op, at(failed_in(facts)), joined.count, variable, at(joined.made),
                                    with_unit(requested_bytes(facts))),
                .bytes = requested_bytes(facts),
                .kept_by = variable,
                .fix = "results_to_host",
                .how = std::move(how),
                .piles_up = true,
                .of_any_batch = true};
}

}  // namespace

// A list that is being filled by a loop in which no module is called and no step ends.
Found find_collected_results(const ReasonFacts& facts) { return name_collected(facts, 0.4); }

Found find_mostly_collected(const ReasonFacts& facts) { return name_collected(facts, 0.65); }

Found find_joined_results(const ReasonFacts& facts) {
  constexpr double kMost = 0.7;  // what the last steps added is in no growth yet
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr) return find_joined_collection(facts);
  const int64_t requested = requested_bytes(facts);
  if (!consists_of_tensors(facts, *growth) || !joins(failed_in(facts))) return {};
  if (static_cast<double>(requested) < kMost * static_cast<double>(growth->grown_bytes)) return {};
  return Reason{
      .text = fmt::format("{}{} joins what {} keeps of each step ({}): {} more, while all parts are still there",
                          failed_in(facts).op, at(failed_in(facts)),
                          growth->referrer.empty() ? "the program" : growth->referrer, growing_text(*growth),
                          with_unit(requested)),
      .bytes = growth->grown_bytes,
      .fix = "stop_growth",
      .how = {
          line_for_kept(growth->referrer, false),
          "out = torch.empty(rows, width)  # or filled in the loop, in place of a list and what cat() makes of it"}};
}

}  // namespace oomdiag
