#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons about graphs that backward has no use for: parts of the model that no optimizer trains, and forward passes
// that no backward follows.
//
// Autograd records an op if one of its inputs requires a gradient. So the graph that a step builds before the first op of a
// trained module is of parameters that require a gradient and that nobody updates: a teacher, a frozen encoder that was only
// left out of the optimizer. Behind the first trained module gradients may flow through an untrained one (a perceptual loss),
// but not in a forward pass that begins with data.

namespace oomdiag {
namespace {

enum class Training : uint8_t { no_parameters, trained, untrained, both };

/// Which modules the optimizers train, by the names of live parameters.
class TrainedModules {
 public:
  explicit TrainedModules(const MemoryState& state) {
    for (const LiveBlock& block : state.blocks) {
      if (block.pending_free) continue;
      const bool is_of_module = block.category == Category::parameter && block.name.find('.') != block.name.npos;
      trained_in_modules_ += block.trained && is_of_module ? 1 : 0;
      trained_elsewhere_ += block.trained && !is_of_module ? 1 : 0;
      uses_elsewhere_ |= block.trained && !is_of_module && !block.saved_by.empty();
      untrained_in_graph_ |= is_of_module && !block.trained && !block.saved_by.empty();
      if (is_of_module) add(block);
    }
  }

  /// The same of an op. Where models have modules of equal names, the nodes that keep their parameters distinguish them, if those of the
  /// others are of other lines: not every node keeps its parameter.
  Training find(const Where& made) const {
    const Training by_name = find(made.module);
    const auto lines = places_.find(made.module);
    if (is_namesake(made, by_name)) return Training::no_parameters;
    if (lines == places_.end() || !has_both(made.module)) return by_name;
    Parameters here, elsewhere;
    for (const auto& [line, parameters] : lines->second) {
      Parameters& place = line == made.source ? here : elsewhere;
      place.trained |= parameters.trained;
      place.untrained |= parameters.untrained;
    }
    if (here.untrained && !here.trained && elsewhere.trained) return Training::untrained;
    if (here.trained && !here.untrained && elsewhere.untrained) return Training::trained;
    return by_name;
  }

  /// A trained parameter that no called module has may be an image that is optimized, which any op may lead to; several that
  /// nothing has used are those of a model that is yet to be called.
  bool is_conclusive() const {
    if (trained_elsewhere_ == 0) return trained_in_modules_ > 0;
    return trained_elsewhere_ > 1 && !uses_elsewhere_;
  }

  Training find(std::string_view module) const {
    if (module.empty()) return Training::no_parameters;
    const std::string inside = std::string(module) + ".";
    bool trained = false, untrained = false, twins = true;
    for (auto at = names_.lower_bound(inside); at != names_.end() && at->first.starts_with(inside); ++at) {
      trained |= at->second.trained;
      untrained |= at->second.untrained;
      twins &= at->second.trained && at->second.untrained && at->second.shapes_are_equal && untrained_in_graph_;
    }
    // Two models of equal layers, as a target network is: each has built half of what modules of that name made.
    if (trained && untrained) return twins ? Training::both : Training::trained;
    return trained ? Training::trained : untrained ? Training::untrained : Training::no_parameters;
  }

 private:
  struct Parameters {
    bool trained = false, untrained = false, shapes_are_equal = true;
    std::string_view shape{};
  };

  /// Whether all that the line calls is trained, or nothing of it, and the module of this name that is `by_name` is called by other
  /// lines only: modules of two nn.Sequential have equal names.
  bool is_namesake(const Where& made, Training by_name) const {
    if (by_name != Training::trained && by_name != Training::untrained) return false;
    const auto line = lines_.find(made.source);
    const auto own = places_.find(made.module);
    if (line == lines_.end() || own == places_.end() || own->second.contains(made.source)) return false;
    const Parameters& called = line->second;
    return by_name == Training::trained ? called.untrained && !called.trained : called.trained && !called.untrained;
  }

  bool has_both(std::string_view module) const {
    const std::string inside = std::string(module) + ".";
    bool trained = false, untrained = false;
    for (auto at = names_.lower_bound(inside); at != names_.end() && at->first.starts_with(inside); ++at) {
      trained |= at->second.trained;
      untrained |= at->second.untrained;
    }
    return trained && untrained;
  }

  void add(const LiveBlock& block) {
    for (const Where& node : block.saved_by) {
      Parameters& place = places_[node.module][node.source];
      (block.trained ? place.trained : place.untrained) = true;
      Parameters& line = lines_[node.source];
      (block.trained ? line.trained : line.untrained) = true;
    }
    Parameters& parameters = names_[std::string(block.name)];
    parameters.shapes_are_equal &= parameters.shape.empty() || parameters.shape == block.shape;
    parameters.shape = block.shape;
    (block.trained ? parameters.trained : parameters.untrained) = true;
  }

  std::map<std::string, Parameters, std::less<>> names_;
  std::map<std::string_view, std::map<std::string_view, Parameters>> places_;  ///< by module and line
  std::map<std::string_view, Parameters> lines_;                               ///< of all modules
  int64_t trained_in_modules_ = 0, trained_elsewhere_ = 0;
  bool uses_elsewhere_ = false;
  bool untrained_in_graph_ = false;  ///< a node keeps an untrained parameter
};

/// What stays of the graph before the first trained module.
struct UnusedGraph {
  int64_t bytes = 0;
  std::string_view module{};  ///< the first one
  Where made{};

  void add(const StepAllocation& block, int64_t part) {
    if (module.empty()) {
      module = block.made.module;
      made = block.made;
    }
    bytes += part;
  }
};

UnusedGraph find_unused_graph(const ReasonFacts& facts, const TrainedModules& modules) {
  UnusedGraph graph;
  Training now = Training::no_parameters;
  for (const StepAllocation& block : facts.device.step_allocations.blocks) {
    if (!is_of_forward_graph(block)) continue;
    const Training training = modules.find(block.made);
    if (training == Training::trained) break;
    if (training != Training::no_parameters) now = training;
    if (now == Training::no_parameters || block.died != StepAllocation::kNever) continue;
    graph.add(block, now == Training::both ? block.bytes / 2 : block.bytes);
  }
  return graph;
}

/// How many inputs of a module's nodes no graph leads to.
int64_t count_data(const StepAllocations& step, const Where& module) {
  return std::ranges::count_if(step.blocks, [&](const StepAllocation& block) {
    if (block.in_graph || is_of_models(block.category) || block.category == Category::buffer) return false;
    return std::ranges::any_of(block.saved_by, [&](const Where& node) {
      return node.module == module.module && node.source == module.source;
    });
  });
}

/// The same behind trained modules: forward passes of an untrained model that begin with data, and not with what a trained one made. Of
/// the passes that one line makes as many are such ones as the first module was given data. A trained module within a pass ends what is
/// unused of it.
UnusedGraph find_unused_passes(const ReasonFacts& facts, const TrainedModules& modules) {
  struct Passes {
    int64_t count = 0;
    UnusedGraph graph{};
  };
  const StepAllocations& step = facts.device.step_allocations;
  std::map<std::string_view, Passes> lines;
  const StepAllocation* first = nullptr;
  Passes* pass = nullptr;
  for (const StepAllocation& block : step.blocks) {
    if (!is_of_forward_graph(block)) continue;
    const Training training = modules.find(block.made);
    if (first == nullptr && training == Training::untrained) first = &block;
    if (training == Training::trained) pass = nullptr;
    const bool begins = first != nullptr && training == Training::untrained && block.category != Category::workspace &&
                        block.made.module == first->made.module && block.made.op == first->made.op;
    if (begins) pass = &lines[block.made.source];
    if (pass == nullptr) continue;
    pass->count += begins ? 1 : 0;
    if (block.died == StepAllocation::kNever) pass->graph.add(block, block.bytes);
  }
  UnusedGraph all;
  for (auto& [line, passes] : lines) {
    const int64_t data = count_data(step, {.module = first->made.module, .source = line});
    passes.graph.bytes = passes.graph.bytes / passes.count * std::min(passes.count, data);
    if (passes.graph.bytes > all.bytes) all = passes.graph;
  }
  return all;
}

/// What is left of a backward pass that has made the gradients of all that is trained: nodes that keep parameters of no optimizer.
UnusedGraph find_rest_of_backward(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase != Phase::backward) return {};
  UnusedGraph rest;
  int64_t trained = 0, gradients = 0, untrained_to_come = 0;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (block.pending_free) continue;
    const bool is_parameter = block.category == Category::parameter;
    if (is_parameter && block.trained && !block.saved_by.empty()) return {};
    trained += is_parameter && block.trained ? 1 : 0;
    untrained_to_come += is_parameter && !block.trained && !block.saved_by.empty() ? 1 : 0;
    gradients += block.category == Category::gradient && block.step == failed->step ? 1 : 0;
    if (block.category != Category::activation || block.saved_by.empty()) continue;
    if (rest.module.empty()) rest = {.bytes = rest.bytes, .module = block.made.module, .made = block.made};
    rest.bytes += block.bytes;
  }
  return trained > 0 && gradients >= trained && untrained_to_come > 1 ? rest : UnusedGraph{};
}

const Growth* retained_graph(const ReasonFacts& facts) {
  const Growth* growth = facts.growths.empty() ? nullptr : &facts.growths.front();
  const bool retained = growth != nullptr && growth->kind == GrowthKind::retained_graph;
  return retained && is_large(facts, growth->grown_bytes, 0.2) ? growth : nullptr;
}

/// Whether the node is of a torch.autograd.Function of the program: those of PyTorch are numbered, "ReluBackward0". One that runs its
/// forward again has a graph of its own.
bool is_of_own_function(std::string_view node) { return node.ends_with("Backward"); }

/// What nodes keep of what backward made: it was recorded, to be differentiated once more.
Share sum_graph_of_backward(const ReasonFacts& facts) {
  return sum_blocks(facts, [](const LiveBlock& block) {
    return block.phase == Phase::backward && block.category == Category::activation && !block.saved_by.empty() &&
           !is_of_own_function(block.made.node);
  });
}

std::vector<std::string> lines_without_training() {
  return {
      kWithoutCreateGraph,
      "for part in x.split(64): loss_of(part).backward()  # else a part at a time: gradients add up, as of the sum"};
}

Share sum_run_through(const ReasonFacts& facts) {
  return sum_blocks(facts, [](const LiveBlock& block) { return block.backward_ran; });
}

}  // namespace

Found find_retained_graph(const ReasonFacts& facts) {
  constexpr double kWorth = 0.15;
  const Share kept = sum_run_through(facts);
  const bool runs_again =
      failure(facts) != nullptr && failure(facts)->phase == Phase::backward;  // of another loss, say
  if (runs_again || sum_graph_of_backward(facts).count > 0) return {};
  if (!is_large(facts, kept.bytes) && !(is_large(facts, kept.bytes, kWorth) && lets_request_through(facts, kept.bytes)))
    return {};
  return Reason{
      .text = fmt::format("backward(retain_graph=True): backward has gone through this graph, and it still keeps "
                          "{} of activations{}",
                          with_unit(kept.bytes), at(kept.made())),
      .bytes = kept.bytes,
      .fix = "plain_backward"};
}

Found find_second_derivatives(const ReasonFacts& facts) {
  constexpr double kWorth = 0.1;  // of the memory: a few scalars of a penalty are none
  const Share graph = sum_graph_of_backward(facts);
  if (!is_large(facts, graph.bytes, kWorth)) return {};
  const Share all = sum_blocks(facts, [](const LiveBlock& block) {
    return block.backward_ran || (block.phase == Phase::backward && block.category != Category::gradient);
  });
  if (!is_large(facts, all.bytes)) return {};
  return Reason{
      .text = fmt::format("second derivatives: create_graph=True keeps what forward computed{}, and a graph of its "
                          "backward beside it, {} in all",
                          at(graph.made()), with_unit(all.bytes)),
      .bytes = all.bytes,
      .fix = "derivatives_in_parts",
      .how = trains(facts) ? std::vector<std::string>() : lines_without_training()};
}

Found find_kept_by_functions(const ReasonFacts& facts) {
  constexpr size_t kSeveral = 3;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase != Phase::backward || !is_of_own_function(failed->where.node)) return {};
  std::set<std::string_view> modules;  // of the forward ops: nodes of some of these have run, and keep it still
  const Share kept = sum_blocks(facts, [&](const LiveBlock& block) {
    const bool is_made_there =
        block.phase == Phase::backward && block.made.node == failed->where.node && block.category != Category::gradient;
    if (is_made_there) modules.insert(block.made.module);
    return is_made_there;
  });
  if (modules.size() < kSeveral || !is_large(facts, kept.bytes)) return {};
  return Reason{
      .text = fmt::format("what {} makes in backward stays for {} of the layers that it has been through{}: {}",
                          failed->where.node, modules.size(), at(kept.made()), with_unit(kept.bytes)),
      .bytes = kept.bytes,
      .fix = "save_output",
      .how = {"ctx.x = None  # at the end of backward(), all that it has set on ctx: a node keeps its ctx until "
              "the whole backward pass is over"}};
}

namespace {

/// The variable of the model that is not trained and has this module, as the program calls it, "teacher"; else the outermost module.
std::string name_untrained(const ReasonFacts& facts, std::string_view module) {
  const std::string_view outermost = outermost_module(module);
  std::set<std::string_view> models;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_of_module = block.category == Category::parameter && !block.trained && !outermost.empty() &&
                              outermost_module(block.name) == outermost;
    const std::string_view model = is_of_module ? module_of(facts.referrers.find(block)) : std::string_view();
    if (!model.empty()) models.insert(model);
  }
  return models.size() == 1 ? as_written(*models.begin()) : std::string(outermost);
}

}  // namespace

Found find_graph_without_use(const ReasonFacts& facts) {
  const TrainedModules modules(facts.device.state);
  if (!modules.is_conclusive() || facts.device.sharded) return {};
  UnusedGraph graph = find_unused_graph(facts, modules);
  if (!is_large(facts, graph.bytes, 0.2)) graph = find_unused_passes(facts, modules);
  if (!is_large(facts, graph.bytes, 0.2)) graph = find_rest_of_backward(facts);
  if (!is_large(facts, graph.bytes, 0.2)) return {};
  const std::string name = name_untrained(facts, graph.module);
  const std::string what = name.empty() ? "a model" : name;
  const std::string line = short_place(graph.made);
  return Reason{.text = fmt::format("{} builds a graph that trains nothing: none of its parameters is an optimizer's, "
                                    "{} ({})",
                                    what, with_unit(graph.bytes), line),
                .bytes = graph.bytes,
                .fix = "no_grad_untrained",
                .how = {fmt::format("with torch.no_grad():  # around the call of {}; or output.detach()",
                                    name.empty() ? "the model that is not trained" : what)}};
}

// As of a generator, while its critic trains on what it made, detached. The step before tells that nothing runs backward through it.
Found find_graph_beside_backward(const ReasonFacts& facts) {
  constexpr int64_t kSeveral = 4;
  constexpr uint32_t kFewestNodes = 4;
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr || failed->phase != Phase::backward || facts.device.sharded) return {};
  const auto runs_backward = [&](std::string_view line) {
    return line == failed->where.source ||
           std::ranges::any_of(facts.device.complete.blocks, [&](const StepAllocation& block) {
             return block.is_of_step() && block.phase == Phase::backward && block.made.source == line;
           });
  };
  std::map<std::string_view, Share> lines;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_beside = block.category == Category::output && block.phase == Phase::forward &&
                           block.step == failed->step && block.saved_by.empty() && !block.made.module.empty() &&
                           !block.pending_free && !block.backward_ran;
    if (is_beside) lines[block.made.source].add(block);
  }
  const auto most = std::ranges::max_element(lines, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == lines.end() || facts.device.complete.blocks.empty()) return {};
  const auto& [line, share] = *most;
  if (share.count < kSeveral || !is_large(facts, share.bytes, 0.2) || runs_backward(line)) return {};
  const auto holder = std::ranges::find_if(facts.device.referrers, [&, line = line](const Referrer& one) {
    return one.nodes >= kFewestNodes && one.made.source == line;
  });
  if (holder == facts.device.referrers.end()) return {};
  const std::string name = as_written(variable_name(holder->variable));
  return Reason{
      .text = fmt::format("the graph behind '{}' is no part of this backward pass, nor of that of the step before, "
                          "and holds {} ({})",
                          name, with_unit(share.bytes), short_place(share.made())),
      .bytes = share.bytes,
      .kept_by = std::string(holder->variable),
      .fix = "no_grad_untrained",
      .how = {fmt::format("with torch.no_grad():  # around the call that makes {}: detach() of it later keeps the "
                          "graph",
                          name)}};
}

// Its steps are calls of the model: no backward has divided them.
Found find_passes_without_backward(const ReasonFacts& facts) {
  const Growth* growth = retained_graph(facts);
  if (growth == nullptr || facts.device.attribution.backward_bytes > 0 || expects_backward(facts)) return {};
  if (find_reference_cycle(facts)) return {};  // no variable keeps these graphs
  const OutOfMemory* const failed = failure(facts);
  const std::string caller =
      failed == nullptr ? short_place(growth->held) : find_caller_of_model(parse_stack(failed->stack), growth->held);
  return Reason{.text = fmt::format("evaluation keeps autograd graphs: no backward follows any forward pass, {} per "
                                    "pass ({})",
                                    with_unit(growth->bytes_per_step), caller),
                .bytes = growth->grown_bytes,
                .kept_by = growth->referrer,
                .fix = "no_grad_in_evaluation",
                .how = {fmt::format("with torch.no_grad():  # around the loop of {}, if it evaluates", caller),
                        "loss.backward()  # in the loop, if it trains: gradients add up, as of the sum"}};
}

Found find_passes_before_backward(const ReasonFacts& facts) {
  const Growth* growth = retained_graph(facts);
  if (growth == nullptr || facts.device.attribution.backward_bytes > 0 || !expects_backward(facts)) return {};
  if (growth->is_collected()) return {};  // its list is to blame, whether a backward pass is to come or not
  return Reason{.text = fmt::format("{} forward passes before the first backward: their graphs hold {} ({})",
                                    growth->last_step, with_unit(growth->grown_bytes), short_place(growth->held)),
                .bytes = growth->grown_bytes,
                .fix = "backward_of_each_pass"};
}

Found find_vectorized(const ReasonFacts& facts) {
  if (!facts.device.failure) return {};
  const OutOfMemory& failed = *facts.device.failure;
  constexpr std::string_view kVmap = "_functorch/vmap.py";
  if (contains(failed.stack, kVmap) && is_large(facts, failed.requested_bytes, 0.2)) {
    return Reason{.text = fmt::format("vmap computes all samples at once: {} for one result ({})",
                                      with_unit(failed.requested_bytes), short_place(failed.where)),
                  .bytes = failed.requested_bytes,
                  .fix = "vmap_in_chunks"};
  }
  // In backward the stack is that of the forward op's line.
  const Share work = sum_blocks(facts, is_data);
  const int64_t bytes = work.bytes + failed.requested_bytes;
  if (failed.phase != Phase::backward || !contains(failed.first_stack, kVmap) || !is_large(facts, bytes, 0.5))
    return {};
  return Reason{.text = fmt::format("vmap computes the gradients of all samples at once: {} ({})", with_unit(bytes),
                                    short_place(failed.where)),
                .bytes = bytes / 2,
                .fix = "vmap_in_chunks"};
}

}  // namespace oomdiag
