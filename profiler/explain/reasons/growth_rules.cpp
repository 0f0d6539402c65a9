#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/variable_counts.h"
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

// Rows of kReasons about what stays from step to step: which graph, cycle or traceback keeps it, and why. Their evidence is what grows
// (growth.h), the variables that lead to tensors (Referrer), and the graphs of the steps.

namespace oomdiag {
namespace {

/// Whether a graph that a variable leads to may be what keeps them: its nodes have no objects of Python.
bool is_kept_by_graph(const ReasonFacts& facts, const Growth& growth) {
  const bool in_graph = std::ranges::any_of(facts.device.step_allocations.blocks, [&](const StepAllocation& block) {
    return block.in_graph && block.made.op == growth.held.op && block.made.source == growth.held.source;
  });
  if (!in_graph || !keeps_nodes(facts)) return false;
  // Nodes that are reached may be too few for all that stays.
  int64_t nodes = 0;
  for (const Referrer& one : facts.device.referrers) nodes += one.earlier_nodes();
  // What no node saves is in the graph of its own step alone.
  if (growth.kind == GrowthKind::kept_tensors && !growth.is_referred()) {
    const int64_t ops = std::ranges::count_if(facts.device.complete.blocks, is_of_forward_graph);
    if (nodes * 2 < ops * (int64_t{growth.last_step} - growth.first_step)) return false;
  }
  return growth.leads_to_all_steps(nodes);
}

/// The graphs of all steps that a container keeps, where what grows fastest has no variable: what backward made so that it can be
/// differentiated is of the same graphs. Null where there is none.
const Growth* find_collected_graphs(const ReasonFacts& facts, const Growth& fastest) {
  if (!fastest.referrer.empty()) return nullptr;
  const auto found = std::ranges::find_if(facts.growths, [](const Growth& one) {
    return one.kind == GrowthKind::retained_graph && one.is_collected() && !one.is_referred();
  });
  return found == facts.growths.end() ? nullptr : &*found;
}

/// The same where each step leaves one tensor behind: no variable refers to it, and one leads to as many nodes.
bool is_kept_by_one_graph(const ReasonFacts& facts, const Growth& growth) {
  const int64_t blocks = growth.places.empty() ? 0 : growth.places.front().blocks;
  const bool leads = std::ranges::any_of(facts.device.referrers, [&](const Referrer& one) {
    return one.earlier_nodes() >= std::max(blocks, kSeveralPasses);
  });
  return growth.referrer.empty() && !growth.is_referred() && leads && is_kept_by_graph(facts, growth);
}

bool is_of_growth(const Growth& growth, const LiveBlock& block) {
  return block.made == growth.held || growth.has(block.made, block.context);
}

/// Whether it went as the error was raised: a list that an expression was filling had held it, which no variable refers to. Cycles stay,
/// unless the garbage collector has run in between.
bool is_let_go(const ReasonFacts& facts, const Growth& growth) {
  std::vector<const LiveBlock*> let_go;
  int64_t all = 0, gone = 0;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.pending_free || !is_of_growth(growth, block)) continue;
    all += block.bytes;
    gone += block.let_go ? block.bytes : 0;
    if (block.let_go && block.made == growth.held) let_go.push_back(&block);
  }
  return gone * 2 > all && !is_garbage(std::move(let_go));
}

/// In how many steps a state of an optimizer was made: one makes all of it in one.
size_t count_optimizers(const ReasonFacts& facts) {
  std::set<uint32_t> steps;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.category == Category::optimizer_state) steps.insert(block.step);
  }
  return steps.size();
}

/// What backward makes so that it can be differentiated once more. Backward of an op that a graph records, too, has an op's name.
bool is_differentiated(const GrowingPlace& place) {
  return place.differentiated || (place.where.node.empty() && contains(place.where.op, "_backward"));
}

/// Whether the variable has a tensor that collects results of several steps.
bool is_joined(const ReasonFacts& facts, const Growth& growth) {
  return std::ranges::any_of(facts.device.referrers, [&](const Referrer& one) {
    return joins({.op = one.made.op}) && !growth.referrer.empty() &&
           fold_subscripts(one.variable) == fold_subscripts(growth.referrer);
  });
}

/// Whether each step keeps what backward made for a second derivative, and no list collects it: the next step is computed from it.
bool differentiates_steps(const ReasonFacts& facts, const Growth& growth) {
  constexpr double kWorth = 0.2;
  if (growth.kind == GrowthKind::growing_buffer || growth.is_collected() || is_joined(facts, growth)) return false;
  int64_t all = 0, of_backward = 0;
  for (const Growth& one : facts.growths) {
    for (const GrowingPlace& place : one.places) {
      all += place.bytes_per_step;
      of_backward += is_differentiated(place) ? place.bytes_per_step : 0;
    }
  }
  return of_backward > 0 && static_cast<double>(of_backward) >= kWorth * static_cast<double>(all);
}

Reason inner_steps(const Growth& growth) {
  const std::string kept =
      growth.referrer.empty()
          ? "each step is computed from the gradients of the one before, and its graph stays with theirs"
          : growth.referrer + " keeps the graph of the gradients of each step, as it is computed from them";
  return {
      .text = fmt::format("create_graph=True{}: {}, {}", at(growth.held), kept, growing_text(growth)),
      .bytes = growth.grown_bytes,
      .fix = "stop_growth",
      .how = {"gradients = torch.autograd.grad(loss, weights, create_graph=False)  # first order; or fewer inner steps",
              "weights = [w.detach().requires_grad_() for w in weights]  # where the steps before need no gradient",
              "# a sum of gradients: differentiate those of one batch at a time, and add up the results"}};
}

/// Of autograd.grad() in most programs: no parameter's .grad keeps it.
Reason differentiated_again(const ReasonFacts& facts, const Growth& growth) {
  const std::string place = at(growth.held);
  return {.text = fmt::format("create_graph=True: derivatives are kept with graphs of their own{}, {} per step in all",
                              place.empty() ? "" : ", of the ops" + place, with_unit(sum_per_step(facts.growths))),
          .bytes = sum_grown(facts.growths),
          .fix = "stop_growth",
          .how = {kWithoutCreateGraph, "kept.append(gradient.detach())  # or keep it without its graph"}};
}

/// Attributes of objects whose tensors are in a graph as the program ends: states that one step hands to the next.
std::vector<std::string_view> list_attributes_in_graphs(const ReasonFacts& facts) {
  constexpr size_t kMaxNames = 6;
  std::vector<std::string_view> names;
  for (const Referrer& one : facts.device.referrers) {
    const std::string_view name = variable_name(one.variable);
    const bool is_state = one.nodes > 0 && one.variable.starts_with("attribute ") && module_of(&one).empty();
    if (is_state && names.size() < kMaxNames && name.find('[') == name.npos) names.push_back(name);
  }
  return names;
}

/// Whether it trains, and no backward pass has made a gradient of a parameter yet: what a list keeps may be losses to be added.
bool waits_for_backward(const ReasonFacts& facts) {
  return trains(facts) && sum_category(facts, Category::gradient).count == 0 &&
         sum_category(facts, Category::optimizer_state).count == 0;
}

/// `states`: what one step hands to the next.
std::vector<std::string> lines_for_graphs(const ReasonFacts& facts, const std::string& variable,
                                          const std::vector<std::string_view>& states) {
  if (const std::string hook = line_for_hook(variable); !hook.empty()) return {hook};
  const std::string_view name = variable_name(variable);
  if (!is_container(variable)) {
    std::vector<std::string> lines;
    for (const std::string_view state : states)
      lines.push_back(fmt::format("{0} = {0}.detach()  # before the next step uses it", state));
    const auto kept = std::ranges::find(facts.device.referrers, variable, &Referrer::variable);
    const bool is_tensor = kept != facts.device.referrers.end() && !kept->is_scalar();
    if (lines.empty() && is_tensor) lines.push_back(fmt::format("{0} = {0}.detach()  # at the end of the step", name));
    if (lines.empty())
      lines.push_back(fmt::format("{0} += {1}.item()  # of a tensor: {1}.detach()",
                                  name.empty() || name == "loss" ? "total" : name,
                                  name.empty() || contains_one_of(name, {"loss", "total"}) ? "loss" : "added"));
    return lines;
  }
  if (name.ends_with("_buffers"))
    return {
        "with torch.no_grad():  # around the lines that assign buffers, as self.running_mean = …: they are of no graph",
        "self.running_mean = value.detach()"};
  const bool is_list = is_appended_to(variable);
  std::vector<std::string> lines{
      fmt::format("{}.append(x.detach())  # and at each other line that stores there; of a scalar: x.item(); on the "
                  "host: x.detach().cpu()",
                  is_list ? name : "kept")};
  if (facts.device.attribution.backward_bytes == 0 || waits_for_backward(facts))
    lines.emplace_back(
        "loss.backward()  # in the loop, if these are losses to be added: gradients add up, as of the sum");
  return lines;
}

/// Whether most of it has sizes of the weights that live: state dicts, and copies of models.
bool is_as_large_as_weights(const ReasonFacts& facts, const Growth& growth) {
  const std::set<int64_t> weights = find_sizes_of_weights(facts);
  const auto grows = [&](const LiveBlock& block) {
    return !is_of_models(block.category) && is_of_growth(growth, block);
  };
  const Share all = sum_blocks(facts, grows);
  const Share copies = sum_blocks(facts, [&](const LiveBlock& block) {
    const bool is_copied = block.made.op.empty() || is_copy(block.made.op) || block.made.op == "aten::clone";
    return grows(block) && is_copied && weights.contains(block.requested_bytes);
  });
  return copies.bytes * 2 > all.bytes;
}

/// The variable that leads to most nodes.
std::string find_graph_variable(const ReasonFacts& facts) {
  VariableCounts nodes;
  for (const Referrer& one : facts.device.referrers) {
    if (one.earlier_nodes() > 0) nodes.add(one.variable, one.nodes);
  }
  return std::string(nodes.most());
}

/// "list" of "list 'losses' in train (train.py:9)".
std::string_view type_word(std::string_view variable) { return variable.substr(0, variable.find(' ')); }

/// "lists 'a', 'b', 'c' in train (train.py:9)" of variables of one function and one kind.
std::string name_together(const std::string& variable, const std::vector<std::string>& others) {
  std::vector<std::string> names;
  for (const std::string& one : others) names.push_back(fmt::format("'{}'", variable_name(one)));
  const size_t in = variable.find(" in ");
  return fmt::format("{}s '{}', {}{}", type_word(variable), variable_name(variable), fmt::join(names, ", "),
                     in == variable.npos ? "" : variable.substr(in));
}

/// Others to which each step adds, graph and all: sums, each of which leads to as many nodes that no other one leads to; or containers
/// with a tensor of each step's graph, which lead to nearly the same nodes.
std::vector<std::string> list_graphs_beside(const ReasonFacts& facts, const Growth& growth,
                                            const std::string& variable) {
  constexpr int64_t kFewestSteps = 3;
  constexpr size_t kMaxNames = 3;
  const int64_t steps = std::max(kFewestSteps, growth.grown_bytes / std::max<int64_t>(1, growth.bytes_per_step));
  std::map<std::string_view, int64_t> nodes;
  for (const Referrer& one : facts.device.referrers) {
    const bool is_alike = one.variable != variable && type_word(one.variable) == type_word(variable) &&
                          function_of(one.variable) == function_of(variable);
    if (is_alike && (is_container(variable) || one.is_scalar())) nodes[one.variable] += one.nodes;
  }
  std::vector<std::string> others;
  for (const auto& [other, count] : nodes) {
    if (count >= steps && others.size() < kMaxNames) others.emplace_back(other);
  }
  return others;
}

/// Many equal tensors of one line, made before any module was called, of which no variable is known.
Found find_cycles_without_steps(const ReasonFacts& facts) {
  constexpr int64_t kSeveral = 3;
  if (!facts.device.looked_for_referrers || facts.device.state.step > 0) return {};
  std::map<std::tuple<std::string_view, std::string_view, int64_t>, std::vector<const LiveBlock*>> alike;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool may_be_cycle = !block.pending_free && !is_of_models(block.category);
    if (may_be_cycle && !block.made.source.empty())
      alike[{block.made.op, block.made.source, block.bytes}].push_back(&block);
  }
  const auto most = std::ranges::max_element(
      alike, {}, [](const auto& entry) { return std::ssize(entry.second) * std::get<int64_t>(entry.first); });
  if (most == alike.end() || std::ssize(most->second) < kSeveral) return {};
  const auto& [op, source, bytes] = most->first;
  const int64_t count = std::ssize(most->second);
  const auto known = std::ranges::count_if(facts.device.referrers, [&, op = op, source = source](const Referrer& one) {
    return one.made.op == op && one.made.source == source;
  });
  std::vector<const LiveBlock*> let_go;
  std::ranges::copy_if(most->second, std::back_inserter(let_go), &LiveBlock::let_go);
  const bool is_list = std::ssize(let_go) * 2 > count && !is_garbage(std::move(let_go));
  int64_t of_line = 0;  // weights of a model, which go to the GPU by one line, are of several sizes
  for (const auto& [maker, blocks] : alike) {
    if (std::get<1>(maker) == source) of_line += std::ssize(blocks) * std::get<int64_t>(maker);
  }
  if (bytes * count * 5 < of_line * 4) return {};
  if (is_list || known * 2 >= count || !is_large(facts, bytes * count, 0.35)) return {};
  return reference_cycle(
      fmt::format("{} tensors of {} made{}", count, with_unit(bytes), at({.op = op, .source = source})), bytes * count);
}

/// Graphs of earlier steps that a container leads to, where memory ran out after too few steps to call it growth.
Found find_few_earlier_graphs(const ReasonFacts& facts) {
  const uint32_t now = facts.device.state.step;
  const std::string variable = find_graph_variable(facts);
  if (failure(facts) == nullptr || facts.device.attribution.backward_bytes == 0) return {};
  // In backward the states of the step before are replaced: what is left of its graph is behind the new ones.
  const std::vector<std::string_view> states =
      failure(facts)->phase == Phase::backward ? list_attributes_in_graphs(facts) : std::vector<std::string_view>();
  const bool is_collected = keeps_nodes(facts) && is_container(variable);
  if (!is_collected && states.empty()) return {};
  std::set<uint32_t> steps;
  const Share earlier = sum_blocks(facts, [&](const LiveBlock& block) {
    const bool is_of_graph = block.category == Category::activation || block.category == Category::output;
    const bool counts = is_of_graph && block.phase == Phase::forward && block.step > 0 && block.step < now;
    if (counts) steps.insert(block.step);
    return counts;
  });
  if (!is_collected) {
    if (!is_large(facts, earlier.bytes, kWorthNaming)) return {};
    return Reason{
        .text = fmt::format("{} {} the graph of earlier steps{}, {}: each step adds its own", fmt::join(states, ", "),
                            states.size() == 1 ? "keeps" : "keep", at(earlier.made()), with_unit(earlier.bytes)),
        .bytes = earlier.bytes,
        .fix = "detach_state",
        .how = lines_for_graphs(facts, variable, states),
        .piles_up = true};
  }
  if (steps.size() < 2 || !is_large(facts, earlier.bytes)) return {};
  return Reason{.text = fmt::format("{} keeps graphs of {} earlier steps{}, {}", variable, steps.size(),
                                    at(earlier.made()), with_unit(earlier.bytes)),
                .bytes = earlier.bytes,
                .fix = "results_to_host",
                .how = lines_for_graphs(facts, variable, {}),
                .piles_up = true};
}

/// A .grad that AccumulateGrad copied, as create_graph=True makes it do: no line of the program stands behind it.
bool is_copied_gradient(const Growth& growth) {
  return growth.kind == GrowthKind::kept_tensors && growth.held.op == "aten::new_empty_strided" &&
         growth.held.source.empty() && growth.held.module.empty();
}

/// Data that require gradients, and their .grad with a graph that leads back to them: a cycle that goes through C++, which no garbage
/// collector sees.
Found find_tensors_with_their_gradients(const ReasonFacts& facts) {
  const auto gradients = std::ranges::find_if(facts.growths, is_copied_gradient);
  if (gradients == facts.growths.end() || !gradients->referrer.empty()) return {};
  const Growth* leaves = nullptr;
  int64_t all = 0;
  bool is_differentiated_again = false;
  for (const Growth& one : facts.growths) {
    all += one.bytes_per_step;
    is_differentiated_again |= std::ranges::any_of(one.places, is_differentiated);
    const bool has_leaves = std::ranges::any_of(one.places, [&](const GrowingPlace& place) {
      return is_copy(place.where.op) && place.where.module.empty() &&
             place.bytes_per_step * 5 >= gradients->bytes_per_step * 4;
    });
    if (has_leaves) leaves = &one;
  }
  const bool are_alike = leaves != nullptr && leaves->bytes_per_step == gradients->bytes_per_step;
  if (!is_differentiated_again && !are_alike) return {};
  const std::string made = are_alike ? at(leaves->held) : "";
  return Reason{
      .text = fmt::format(
          "backward(create_graph=True): data that require gradients{} and their .grad keep one another and the "
          "graph between them, {} per step in all",
          made.empty() ? "" : ", made" + made + ",", with_unit(all)),
      .bytes = sum_grown(facts.growths),
      .kept_by = "a cycle through autograd's graph, which no garbage collector sees",
      .fix = "stop_growth",
      .how = {"gradient, = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)  # in place of "
              "y.backward(…) and x.grad",
              "x.grad = None  # at the end of each step, where backward() is needed"}};
}

/// Where a write in place outside of layers leaves more and more behind: the graph keeps what was there before. Null where none does.
const PlaceCurve* find_write_in_place(const ReasonFacts& facts) {
  const auto write = std::ranges::find_if(facts.device.curves.places, [](const PlaceCurve& place) {
    const bool is_write = place.where.op.ends_with('_') && place.where.module.empty() && !place.where.source.empty();
    return is_write && place.in_graph && !place.blocks.empty() && place.blocks.back() > place.blocks.front();
  });
  return write == facts.device.curves.places.end() ? nullptr : &*write;
}

}  // namespace

Found find_create_graph(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->kind == GrowthKind::growing_buffer) return {};
  if (growth->is_referred()) return {};  // gradients that a variable of the program collects
  if (Found found = find_tensors_with_their_gradients(facts)) return found;
  if (count_optimizers(facts) >= 3) return {};  // whole trainings pile up
  if (find_collected_graphs(facts, *growth) != nullptr) return {};
  if (growth->held.node.empty()) return differentiates_steps(facts, *growth) ? inner_steps(*growth) : Found{};
  // Gradients may just be kept, or be what the program goes on with.
  const bool is_known = std::ranges::any_of(facts.growths, [](const Growth& one) { return !one.places.empty(); });
  const bool any = std::ranges::any_of(
      facts.growths, [](const Growth& one) { return std::ranges::any_of(one.places, is_differentiated); });
  if (is_known && !any) return {};
  if (sum_category(facts, Category::gradient).count == 0) return differentiated_again(facts, *growth);
  return Reason{
      .text = fmt::format("backward(create_graph=True){}: tensors and their .grad keep one another and the graph, {}",
                          at(growth->held), growing_text(*growth)),
      .bytes = growth->grown_bytes,
      .fix = "stop_growth",
      .how = {"gradients = torch.autograd.grad(loss, model.parameters(), create_graph=True)  # in place of backward()",
              "# and where backward() is needed: p.grad = None for each parameter at the end of the step"}};
}

// Parameters that the program itself joins to more: points, experts, units.
Found find_growing_model(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->kind != GrowthKind::growing_buffer) return {};
  const auto is_grown = [&](const LiveBlock& block) { return is_of_growth(*growth, block); };
  const Share all = sum_blocks(facts, is_grown);
  const Share of_model =
      sum_blocks(facts, [&](const LiveBlock& block) { return is_grown(block) && is_of_models(block.category); });
  if (of_model.bytes * 2 <= all.bytes) return {};
  return Reason{
      .text = fmt::format("the model itself grows: {} makes parameters and the optimizer's state larger{}, {} "
                          "more per step, and their gradients with them",
                          growth->held.op.empty() ? "the program" : growth->held.op, at(growth->held),
                          with_unit(sum_per_step(facts.growths))),
      .bytes = sum_grown(facts.growths),
      .fix = "limited_parameters"};
}

// A variable of forward() is made anew by each call: where it leads to what all calls made, something handed that on.
Found find_handed_states(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->kind != GrowthKind::retained_graph || growth->is_collected()) return {};
  if (!is_variable_of_forward(growth->referrer)) return {};
  std::vector<std::string> states;
  for (const Referrer& one : facts.device.referrers) {
    const bool is_of_module = contains(one.variable, "_modules[") && one.variable.starts_with("attribute ");
    if (is_of_module && one.nodes > 0 && !one.is_scalar()) states.push_back(as_written(variable_name(one.variable)));
  }
  if (states.empty()) return {};
  const std::string folded = fold_subscripts(states.front());
  const auto is_alike = [&](const std::string& one) { return fold_subscripts(one) == folded; };
  const bool are_alike = states.size() > 1 && std::ranges::all_of(states, is_alike);
  return Reason{
      .text = fmt::format("a state that modules keep from one call to the next, {}, keeps the graph of all calls{}, {}",
                          states.front(), at(growth->held), growing_text(*growth)),
      .bytes = growth->grown_bytes,
      .fix = "detach_state",
      .how = {
          assign_each(are_alike ? folded : states.front(), [](const std::string& item) { return item + ".detach()"; }) +
              "  # after each batch, or a reset of the model's states",
          "with torch.no_grad():  # around the loop, if it evaluates"}};
}

Found find_earlier_graphs(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr) return find_few_earlier_graphs(facts);
  if (growth->kind == GrowthKind::growing_buffer) return {};
  const bool retained = growth->kind == GrowthKind::retained_graph ? !keeps_outputs(facts, *growth)
                                                                   : is_kept_by_one_graph(facts, *growth);
  const Growth* const collected = find_collected_graphs(facts, *growth);
  if (!retained && collected == nullptr) return {};
  if (collected != nullptr) growth = collected;
  const std::string variable = growth->referrer.empty() ? find_graph_variable(facts) : growth->referrer;
  // What has no variable of its own is behind that of the graphs.
  const auto is_behind = [&](const Growth& one) { return one.referrer.empty() || one.referrer == growth->referrer; };
  const bool is_all = collected != nullptr || std::ranges::all_of(facts.growths, is_behind);
  const int64_t per_step = is_all ? sum_per_step(facts.growths) : growth->bytes_per_step;
  const std::vector<std::string_view> states =
      is_container(variable) ? std::vector<std::string_view>() : list_attributes_in_graphs(facts);
  const std::vector<std::string> others =
      states.empty() && !variable.empty() ? list_graphs_beside(facts, *growth, variable) : std::vector<std::string>();
  const std::string keeps = variable.empty() ? "a tensor that is kept from each step keeps"
                            : others.empty() ? variable + " keeps"
                                             : name_together(variable, others) + " keep";
  std::vector<std::string> how = lines_for_graphs(facts, variable, states);
  for (const std::string& one : others) {
    const std::string line = lines_for_graphs(facts, one, {}).front();
    how.push_back(line.substr(0, line.find("  #")));
  }
  constexpr std::string_view kWaits = "; no backward for the parameters has run yet";
  const std::string handed = states.empty() ? ""
                                            : fmt::format("; {} {} it to the next", fmt::join(states, ", "),
                                                          states.size() == 1 ? "hands" : "hand");
  return Reason{.text = fmt::format("{} the graph of each step{}, {} per step{}{}", keeps, at(growth->held),
                                    with_unit(per_step), handed, waits_for_backward(facts) ? kWaits : ""),
                .bytes = is_all ? sum_grown(facts.growths) : growth->grown_bytes,
                .fix = "stop_growth",
                .how = std::move(how)};
}

// One training after the other, of a layer each: a parameter keeps its gradient until somebody sets it to None.
Found find_gradients_that_pile_up(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->kind != GrowthKind::kept_tensors) return {};
  if (growth->is_referred() || !growth->referrer.empty()) return {};  // a list of them, say
  const auto is_grown = [&](const LiveBlock& block) { return !block.pending_free && is_of_growth(*growth, block); };
  const Share all = sum_blocks(facts, is_grown);
  const Share gradients = sum_blocks(
      facts, [&](const LiveBlock& block) { return is_grown(block) && block.category == Category::gradient; });
  if (gradients.bytes * 2 <= all.bytes) return {};
  return Reason{.text = fmt::format("gradients of more and more parameters stay: {} of {} each by now, made{}, {}",
                                    gradients.count, with_unit(gradients.largest->bytes), at(growth->held),
                                    growing_text(*growth)),
                .bytes = growth->grown_bytes,
                .kept_by = keeper_of_gradients(gradients),
                .fix = "gradients_to_none",
                .how = {"for p in layer.parameters(): p.grad = None  # as soon as this part is trained: no optimizer "
                        "has them any more",
                        "optimizer.zero_grad(set_to_none=True)  # before the optimizer goes"}};
}

// What a program did not reach by its variables as it ended, though these were looked through: objects that refer to
// themselves. Tensors that a library keeps in C++ are rare, and none of them is of each step.
Found find_reference_cycle(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr) return find_cycles_without_steps(facts);
  if (growth->kind == GrowthKind::growing_buffer || !growth->referrer.empty()) return {};
  if (!facts.device.looked_for_referrers || is_kept_by_graph(facts, *growth)) return {};
  if (find_collected_graphs(facts, *growth) != nullptr) return {};
  if (is_let_go(facts, *growth)) return {};
  const std::string what = "what stays of each step" + at(growth->held) + ", " + growing_text(*growth);
  return growth->kind == GrowthKind::retained_graph
             ? cycle_of_graphs(what, growth->grown_bytes, find_write_in_place(facts))
             : reference_cycle(what, growth->grown_bytes);
}

// Of most tensors that stay a variable has a part only.
Found find_small_views(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || growth->kind != GrowthKind::kept_tensors) return {};
  int64_t views = 0, bytes = 0, storage_bytes = 0, all = 0;
  for (const Referrer& referrer : facts.device.referrers) {
    if (!growth->has(referrer.made, referrer.context)) continue;
    ++all;
    if (!referrer.is_small_view()) continue;
    ++views;
    bytes += referrer.bytes;
    storage_bytes += referrer.storage_bytes;
  }
  constexpr int64_t kManyParts = 8;  // of one tensor: together they are most of it
  const int64_t tensors = growth->places.empty() ? 0 : growth->places.front().blocks;
  const bool keep_it_all = bytes * 2 > growth->grown_bytes || (tensors > 0 && views > kManyParts * tensors);
  if (views * 2 <= all || keep_it_all) return {};
  return Reason{
      .text = fmt::format("a view keeps its whole tensor: {}{} {} parts, {} in all, of tensors of {}{}",
                          growth->referrer.empty() ? "a variable" : growth->referrer,
                          growth->is_collected() || growth->referrer.empty() ? " keeps" : " and others keep", views,
                          with_unit(bytes), with_unit(std::min(storage_bytes, growth->grown_bytes)), at(growth->held)),
      .bytes = growth->grown_bytes,
      .fix = "stop_growth",
      .how = {"kept.append(x[0].clone())  # of a view: then its tensor can go; or .cpu()"}};
}

namespace {

/// The list or dict that has most of what was made there: "list 'labels' in train (train.py:9)"; or empty.
std::string find_container(const ReasonFacts& facts, const Where& made) {
  VariableCounts holders;
  for (const Referrer& one : facts.device.referrers) {
    if (one.made == made && is_container(fold_subscripts(one.variable))) holders.add(one.variable, 1);
  }
  return std::string(holders.most());
}

/// Other lists and dicts that have much of what grows, each step something of another line.
std::vector<std::string> list_containers_beside(const ReasonFacts& facts, const Growth& growth) {
  constexpr int64_t kPart = 5;  // of what a step adds
  constexpr size_t kMaxNames = 2;
  const int64_t per_step = sum_per_step(facts.growths);
  std::vector<std::string> beside;
  for (const Growth& one : facts.growths) {
    for (const GrowingPlace& place : one.places) {
      if (place.bytes_per_step * kPart < per_step) continue;
      const std::string most = find_container(facts, place.where);
      const bool is_new = !most.empty() && most != growth.referrer && std::ranges::find(beside, most) == beside.end();
      if (is_new && beside.size() < kMaxNames) beside.push_back(most);
    }
  }
  return beside;
}

}  // namespace

Found find_kept_tensors(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || !consists_of_tensors(facts, *growth)) return {};
  const bool of_weights = is_as_large_as_weights(facts, *growth);
  const std::string what =
      fmt::format("tensors of each step{}{}", at(growth->held), of_weights ? ", as large as weights" : "");
  const std::vector<std::string> beside =
      growth->is_collected() ? list_containers_beside(facts, *growth) : std::vector<std::string>();
  std::vector<std::string> how = lines_for_kept(growth->referrer, of_weights);
  for (const std::string& other : beside) how.push_back(line_for_kept(other, of_weights));
  const std::string who =
      beside.empty() ? growth->referrer : fmt::format("{}, and {}", growth->referrer, fmt::join(beside, ", "));
  return Reason{.text = growth->referrer.empty() ? fmt::format("{} are kept, {}", what, growing_text(*growth))
                                                 : fmt::format("{} {} {}, {}", who, beside.empty() ? "keeps" : "keep",
                                                               what, growing_text(*growth)),
                .bytes = growth->grown_bytes,
                .fix = "stop_growth",
                .how = std::move(how)};
}

// An exception that is kept has its traceback, and that the frames of all calls up to it with what their variables hold.
Found find_kept_traceback(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr || !contains(growth->referrer, kFrameOfTraceback)) return {};
  const std::string_view referrer = growth->referrer;
  const size_t begin = referrer.find(kFrameOfTraceback) + kFrameOfTraceback.size();
  const std::string_view name = referrer.substr(begin, referrer.rfind(kKeepsFrame) - begin);
  int64_t bytes = 0;
  for (const Growth& one : facts.growths) bytes += contains(one.referrer, kFrameOfTraceback) ? one.grown_bytes : 0;
  return Reason{
      .text = fmt::format("exceptions are kept in {}: the traceback of each keeps the frames of its calls, and {} "
                          "of tensors in their variables",
                          name, with_unit(bytes)),
      .bytes = bytes,
      .fix = "stop_growth",
      .how = {"failed.append(str(error))  # in place of the exception; or error.with_traceback(None)"}};
}

namespace {

Reason output_on_context(const std::string& what, int64_t bytes) {
  return {
      .text = fmt::format("{}: ctx has the output, or an object with it, as an attribute; the output keeps its node, "
                          "and that keeps ctx",
                          what),
      .bytes = bytes,
      .kept_by = "its ctx, by an attribute",
      .fix = "save_output",
      .how = {"ctx.save_for_backward(output)  # in place of ctx.output = output; in backward: ctx.saved_tensors",
              "ctx.index = graph.index  # in place of ctx.graph = graph, where the object has the output: only what "
              "backward reads"}};
}

bool is_function(const Where& made) { return !made.op.empty() && !contains(made.op, "::") && made.node.empty(); }

/// The same before any step has ended: much that one function has made, of which no variable and no graph is known.
Found find_output_on_context_without_steps(const ReasonFacts& facts) {
  constexpr int64_t kMany = 8;
  if (!facts.device.looked_for_referrers || keeps_nodes(facts)) return {};
  std::map<std::string_view, Share> functions;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_left = block.category == Category::output && block.saved_by.empty() && !block.let_go;
    if (is_left && !block.pending_free && is_function(block.made)) functions[block.made.op].add(block);
  }
  const auto most = std::ranges::max_element(functions, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == functions.end() || most->second.count < kMany || !is_large(facts, most->second.bytes, 0.35)) return {};
  const auto& [name, left] = *most;
  const auto known =
      std::ranges::count_if(facts.device.referrers, [name = name](const Referrer& one) { return one.made.op == name; });
  if (known * 2 >= left.count) return {};
  return output_on_context(
      fmt::format("{} tensors that {} made{} are still there, {}, and variables lead to few of them", left.count, name,
                  at(left.made()), with_unit(left.bytes)),
      left.bytes);
}

/// Whether the variable that is said to keep the graphs is a tensor that leads to too few nodes for those of all steps: each op of a step
/// that is in a graph made one.
bool leads_to_one_step(const ReasonFacts& facts, const Growth& growth) {
  const auto found = std::ranges::find(facts.device.referrers, growth.referrer, &Referrer::variable);
  if (growth.is_collected() || found == facts.device.referrers.end()) return false;
  const int64_t ops = std::ranges::count_if(facts.device.complete.blocks, is_of_forward_graph);
  return found->nodes * 2 < ops * (int64_t{growth.last_step} - growth.first_step + 1);
}

}  // namespace

// A tensor on the context of an autograd.Function that is its own output leads back to the node, which owns the context.
Found find_output_on_context(const ReasonFacts& facts) {
  const Growth* growth = leading_growth(facts);
  if (growth == nullptr) return find_output_on_context_without_steps(facts);
  if (growth->places.empty() || growth->is_referred()) return {};
  int64_t all = 0, of_function = 0;
  const std::string_view name = growth->held.op;
  // Without a backward pass the node is still there, and with it what it saved.
  const bool has_no_holder =
      facts.device.looked_for_referrers && (growth->referrer.empty() || leads_to_one_step(facts, *growth));
  for (const Growth& one : facts.growths) {
    all += one.bytes_per_step;
    of_function += one.held.op == name ? one.bytes_per_step : 0;
  }
  const bool stays =
      growth->kind == GrowthKind::kept_tensors || (growth->kind == GrowthKind::retained_graph && has_no_holder);
  if (!is_function(growth->held) || !stays || of_function * 5 < all * 4) return {};
  return output_on_context(
      fmt::format("what {} makes{} stays after each step, {}", name, at(growth->held), growing_text(*growth)),
      growth->grown_bytes);
}

}  // namespace oomdiag
