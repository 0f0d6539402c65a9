#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>

#include "profiler/explain/facts/variable_counts.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/evaluation.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/fold_indices.h"
#include "profiler/one_of.h"
#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"
#include "profiler/trace/stack_call.h"

// Rows of kReasons about forward passes whose graphs live: of an evaluation without torch.no_grad(), of several passes before one backward, of one
// that goes through a long sequence step by step.

namespace oomdiag {

namespace {

/// The graphs that forward passes of the failing step built and no backward pass has freed.
struct KeptPasses {
  int64_t bytes = 0;
  int64_t count = 0;  ///< of equal tensors that one op of one module made: the forward passes
  Where most{};       ///< who made them
  int64_t turns = 0;  ///< the same, where one forward pass may make several: turns of a loop within it

  void add(const Where& made, int64_t block_bytes) {
    bytes += block_bytes;
    Line& line = lines_[{made.module, made.op, made.source}];
    ++line.count;
    line.bytes += block_bytes;
    if (made.module.empty()) return;
    Equal& equal = equal_[{made.module, made.op, made.source, block_bytes}];
    equal.made = made;
    ++equal.count;
    equal.last = ++added_;
  }

  /// Sets `count` and `most` by all that was added: of as many, what was the first to be.
  void count_equal() {
    const std::map<std::string_view, int64_t> layers = count_layers();
    int64_t last = 0;
    for (const auto& [maker, equal] : equal_) {
      const auto known = layers.find(name_around(equal.made.module));
      const int64_t times = known == layers.end() ? equal.count : (equal.count + known->second - 1) / known->second;
      if (times < count || (times == count && equal.last > last)) continue;
      count = times;
      most_times_ = equal.count;
      last = equal.last;
      most = equal.made;
    }
  }

  /// `count`, or fewer where most ops ran less often: some run twice in each pass. Not of passes that have a loop.
  int64_t count_passes() const {
    std::vector<int64_t> counts;
    for (const auto& [maker, equal] : equal_) counts.push_back(equal.count);
    if (counts.empty() || most_times_ == 0) return count;
    const auto middle = counts.begin() + std::ssize(counts) / 2;
    std::ranges::nth_element(counts, middle);
    return *middle < 2 ? count : (count * *middle + most_times_ - 1) / most_times_;
  }

  /// What was made about as often as what was made most: by the turns of a loop, each of which may make that several times, and not
  /// before or after it.
  int64_t sum_of_turns() const {
    constexpr int64_t kMaxPerTurn = 8;
    int64_t sum = 0;
    for (const auto& [maker, line] : lines_) {
      if (line.count * kMaxPerTurn >= most_times_) sum += line.bytes;
    }
    return sum;
  }

  /// Of several ops, so that a graph keeps them.
  bool has_layers() const { return equal_.size() >= 3; }

 private:
  struct Equal {
    Where made{};
    int64_t count = 0;
    int64_t last = 0;  ///< the newest is the n-th of all
  };

  /// What one op of one line has made, of whatever size.
  struct Line {
    int64_t count = 0, bytes = 0;
  };

  /// By which count_layers() has it: a model itself, which is called by its class, is above all layers.
  static std::string_view name_around(std::string_view module) {
    const bool is_class =
        !module.empty() && module.front() >= 'A' && module.front() <= 'Z' && module.find('.') == module.npos;
    return is_class ? std::string_view() : module;
  }

  /// How many layers that are alike a module has below it: "encoder" 12 of "encoder.layers.0.norm" … "encoder.layers.11.norm". For each
  /// of them it may do the same in one pass, as adding what the layer was given to its result.
  std::map<std::string_view, int64_t> count_layers() const {
    std::map<std::pair<std::string_view, std::string>, std::set<std::string_view>> alike;
    for (const auto& [maker, equal] : equal_) {
      const std::string_view module = equal.made.module;
      const std::string folded = fold_indices(module);
      if (folded == module) continue;
      alike[{{}, folded}].insert(module);
      for (size_t dot = module.find('.'); dot != module.npos; dot = module.find('.', dot + 1)) {
        alike[{module.substr(0, dot), folded}].insert(module);
      }
    }
    std::map<std::string_view, int64_t> layers;
    for (const auto& [group, modules] : alike) {
      int64_t& most_alike = layers[group.first];
      most_alike = std::max<int64_t>(most_alike, std::ssize(modules));
    }
    return layers;
  }

  std::map<std::tuple<std::string_view, std::string_view, std::string_view, int64_t>, Equal> equal_;
  std::map<std::tuple<std::string_view, std::string_view, std::string_view>, Line> lines_;
  int64_t added_ = 0;
  int64_t most_times_ = 0;  ///< that `most` was made
};

/// How often the step came to the op that its graph begins with: at most so many forward passes. A layer that is used several
/// times in one pass makes as many equal tensors.
int64_t count_beginnings(const StepAllocations& step) {
  const auto is_of_pass = [](const StepAllocation& block) {
    return is_of_forward_graph(block) && !block.made.module.empty();
  };
  const auto first = std::ranges::find_if(step.blocks, is_of_pass);
  if (first == step.blocks.end()) return std::numeric_limits<int64_t>::max();
  return std::ranges::count_if(step.blocks, [&](const StepAllocation& block) {
    return is_of_pass(block) && block.made.module == first->made.module && block.made.op == first->made.op;
  });
}

/// How many modules of one name there are: of layers that no module around them calls, as many as layers.
int64_t count_namesakes(const MemoryState& state) {
  std::map<std::pair<std::string_view, std::string_view>, int64_t> counts;
  int64_t most = 1;
  for (const LiveBlock& block : state.blocks) {
    if (block.category != Category::parameter || block.name.empty() || block.name.find('.') != block.name.npos)
      continue;
    most = std::max(most, ++counts[{block.name, block.shape}]);
  }
  return most;
}

// What nodes save is known of graphs that were walked; that a block is of a graph, of the whole step.
KeptPasses count_passes(const ReasonFacts& f) {
  KeptPasses saved, in_graph;
  for (const LiveBlock& block : f.device.state.blocks) {
    const bool is_saved =
        block.category == Category::activation && block.phase == Phase::forward && !block.pending_free;
    if (is_saved && block.step == f.device.failure->step) saved.add(block.made, block.bytes);
  }
  for (const StepAllocation& block : f.device.step_allocations.blocks) {
    const bool lives = block.died == StepAllocation::kNever;
    if (lives && is_of_forward_graph(block)) in_graph.add(block.made, block.bytes);
  }
  KeptPasses kept = in_graph.bytes > saved.bytes ? in_graph : saved;
  kept.count_equal();
  const int64_t layers = count_namesakes(f.device.state);
  kept.turns = (kept.count + layers - 1) / layers;
  kept.count = std::min(kept.turns, count_beginnings(f.device.step_allocations));
  return kept;
}

/// What is left of the forward passes of earlier steps, where no backward has ever run: each step is a call of the model then.
KeptPasses count_earlier_passes(const ReasonFacts& f) {
  KeptPasses kept;
  if (f.device.attribution.backward_bytes > 0 || !builds_graph(f).value_or(false)) return kept;
  for (const LiveBlock& block : f.device.state.blocks) {
    const bool is_earlier = block.step > 0 && block.step < f.device.failure->step;
    if (is_earlier && block.phase == Phase::forward && is_data(block)) kept.add(block.made, block.bytes);
  }
  kept.count_equal();
  return kept.has_layers() ? kept : KeptPasses{};  // a result alone may be detached
}

/// The call of the failing stack that is named as those of evaluations are, or the end. What a package calls so may be a part of its
/// training, as evaluate_actions() and extract_features() of reinforcement learning are.
auto find_evaluation(const std::vector<StackCall>& calls) {
  return std::ranges::find_if(calls,
                              [](const StackCall& one) { return !is_of_package(one) && is_evaluation(one.function); });
}

/// The call of this function of the program, or the end.
auto find_function(const std::vector<StackCall>& calls, std::string_view name) {
  return std::ranges::find_if(calls, [&](const StackCall& one) { return !name.empty() && one.function == name; });
}

/// The call of the function that a thread of Python runs, or the end where the failing stack is of the main thread. Whether gradients are
/// wanted is a setting of each thread.
auto find_function_of_thread(const std::vector<StackCall>& calls) {
  const auto library = std::ranges::find_if(calls, [](const StackCall& one) {
    return contains_one_of(one.place, {"/threading.py:", "/concurrent/futures/thread.py:"});
  });
  return library == calls.end() || library == calls.begin() ? calls.end() : std::prev(library);
}

/// The innermost call of the failing stack by a function that had not led to its line when that was first reached, or the end: another
/// part of the program runs the same model.
auto find_other_caller(const std::vector<StackCall>& calls, std::string_view first_stack) {
  const std::vector<StackCall> first = parse_stack(first_stack);
  return std::ranges::find_if(calls, [&](const StackCall& one) {
    const bool is_named = !one.function.empty() && !first.empty() && !is_of_package(one);
    return is_named && std::ranges::find(first, one.function, &StackCall::function) == first.end();
  });
}

/// How many forward passes the step before the failing one had, which ended with backward; 0 where none is known.
int64_t count_passes_before(const ReasonFacts& f) {
  const int64_t passes = count_beginnings(f.device.complete);
  return passes == std::numeric_limits<int64_t>::max() ? 0 : passes;
}

/// When the first block that lives of the step that failed was made: through graphs of the steps of training before it backward has gone.
uint64_t find_end_of_trained_steps(const ReasonFacts& f) {
  if (f.device.attribution.backward_bytes == 0) return 0;
  uint64_t first = std::numeric_limits<uint64_t>::max();
  for (const LiveBlock& block : f.device.state.blocks)
    if (block.step >= f.device.failure->step) first = std::min(first, block.born);
  return first;
}

/// The variable that leads to most nodes of autograd, as a list or a sum of losses; or empty.
std::string find_holder_of_graphs(const ReasonFacts& f) {
  VariableCounts nodes, of_containers;
  int64_t all = 0;
  const uint64_t trained = find_end_of_trained_steps(f);
  for (const Referrer& one : f.device.referrers) {
    const bool is_trained = one.born > 0 && one.born < trained;
    if (one.nodes == 0 || is_trained) continue;
    nodes.add(one.variable, one.nodes);
    if (is_container(fold_subscripts(one.variable))) of_containers.add(one.variable, one.nodes);
    all += one.nodes;
  }
  if (all < kSeveralNodes) return {};
  return std::string(nodes.count_of_most() * 2 > all ? nodes.most() : of_containers.most());
}

/// The variable that requires_grad_() was called for, and that is no parameter: "latents"; or empty.
std::string_view find_data_with_gradients(const ReasonFacts& f) {
  const auto data = std::ranges::find_if(f.device.referrers, &Referrer::wants_gradient);
  return data == f.device.referrers.end() ? std::string_view() : variable_name(data->variable);
}

/// Where nothing shows whether a loop evaluates. `data`: as of find_data_with_gradients().
std::vector<std::string> lines_for_loop(const std::string& place, const std::string& holder, std::string_view data) {
  std::vector<std::string> lines{
      data.empty()
          ? fmt::format("with torch.no_grad():  # around the loop of {}, if it evaluates", place)
          : fmt::format("with torch.no_grad():  # around {}, if only what follows needs gradients of '{}': then "
                        "{}.requires_grad_() behind it",
                        place, data, data),
      "loss.backward()  # or autograd.grad() in the loop, if it needs gradients: they add up, as of the sum"};
  const std::string_view name = variable_name(holder);
  if (is_appended_to(holder)) {
    lines.push_back(fmt::format("{}.append(x.detach())  # or x.item(): what is kept, without its graph", name));
  } else if (!name.empty() && !is_container(holder)) {
    lines.push_back(fmt::format("{0} = {0}.detach()  # {1}or .item(): the number, without its graph", name,
                                data.empty() ? "" : "right behind that line; "));
  }
  return lines;
}

/// Whether so much of graphs lives that it is no step of training: those free theirs.
bool keeps_more_than_training(const ReasonFacts& f, int64_t graph_bytes) {
  constexpr double kMore = 1.3;
  Allocations graph;
  std::ranges::copy_if(f.device.complete.blocks, std::back_inserter(graph), is_of_forward_graph);
  const auto of_training = static_cast<double>(graph.empty() ? 0 : find_peak(graph));
  return f.device.attribution.backward_bytes > 0 && of_training > 0 &&
         static_cast<double>(graph_bytes) > kMore * of_training;
}

/// Whether a function that is no evaluation adds up losses, one for each call of the evaluation that it leads to: it trains by a function
/// called predict(), say.
bool is_sum_of_losses(const ReasonFacts& f, const std::vector<StackCall>& calls, std::string_view holder) {
  const auto found = std::ranges::find(f.device.referrers, holder, &Referrer::variable);
  const std::string_view function = function_of(holder);
  const bool is_caller =
      std::ranges::any_of(calls, [&](const StackCall& one) { return !function.empty() && one.function == function; });
  return f.device.attribution.backward_bytes == 0 && found != f.device.referrers.end() && found->is_scalar() &&
         !is_container(holder) && is_caller && !is_evaluation(function);
}

/// How often the step before came to this op of this module.
int64_t count_turns_before(const ReasonFacts& f, const Where& made) {
  return std::ranges::count_if(f.device.complete.blocks, [&](const StepAllocation& block) {
    return is_of_forward_graph(block) && block.made.module == made.module && block.made.op == made.op;
  });
}

/// Whether a loop turns by far more often than in a step of training: it is another part of the program that calls the same layers.
bool turns_more_than_training(const ReasonFacts& f, const KeptPasses& kept) {
  constexpr int64_t kFarMore = 4;
  const int64_t before = count_turns_before(f, kept.most);
  return before > 0 && f.device.attribution.backward_bytes > 0 && before * kFarMore < kept.turns;
}

}  // namespace

// In evaluation nobody runs backward, so each forward pass whose results live keeps its graph.
Found find_graphs_in_evaluation(const ReasonFacts& f) {
  constexpr int64_t kFewestPasses = 3, kUsualPasses = 4;
  const OutOfMemory& failure = *f.device.failure;
  if (failure.phase != Phase::forward && failure.phase != Phase::other) return {};
  KeptPasses kept = count_passes(f);
  const KeptPasses earlier = count_earlier_passes(f);
  kept.bytes += earlier.bytes;
  kept.count += std::min<int64_t>(earlier.count, failure.step - 1);
  const bool turns_more = turns_more_than_training(f, kept);
  if (turns_more) kept.count = std::max(kept.count, kept.turns);
  if (!is_large(f, kept.bytes, kWorthNaming)) return {};
  const std::vector<StackCall> calls = parse_stack(failure.stack);
  const auto evaluation = find_evaluation(calls);
  const auto other = find_other_caller(calls, failure.first_stack);
  const std::string holder = find_holder_of_graphs(f);
  const auto of_holder = find_function(calls, function_of(holder));
  const bool learns_elsewhere = failure.names_backward || trains(f) || f.device.attribution.backward_bytes > 0;
  const auto innermost = evaluation != calls.end() ? evaluation : other;
  // Whoever has the graph in a variable calls what made it, and what runs now.
  const bool holder_calls = of_holder != calls.end() && of_holder > innermost && !learns_elsewhere;
  const auto call = holder_calls ? of_holder : innermost;
  // After training, or in a program that never trains, passes in a row are those of an evaluation.
  const int64_t before = count_passes_before(f);
  const bool as_before = before >= kUsualPasses || before >= kept.count;
  const bool has_trained =
      f.device.attribution.backward_bytes > 0 && (!as_before || turns_more || other != calls.end());
  const bool are_several = kept.count >= kFewestPasses && (!expects_backward(f) || has_trained);
  const bool wants_gradient = wants_gradient_of_data(f);
  if (trains(f) && is_sum_of_losses(f, calls, holder)) return {};
  // Before the first backward pass another caller may be another part of the same forward pass.
  const bool is_other_part = other != calls.end() && f.device.attribution.backward_bytes > 0;
  const bool by_mode = failure.modules_evaluate && !wants_gradient &&
                       (!trains(f) || is_other_part || keeps_more_than_training(f, kept.bytes));
  if (wants_gradient && !has_trained) return {};  // a backward pass is to come
  if (evaluation == calls.end() && !are_several && !by_mode) return {};
  const std::string place = call == calls.end() ? find_caller_of_model(calls, failure.where) : name_call(*call);
  const bool one = kept.count <= 1;
  const std::string passes = one ? "a forward pass" : fmt::format("{} forward passes", kept.count_passes());
  const std::string hold = fmt::format("{} {}", one ? "holds" : "hold", with_unit(kept.bytes));
  const std::string_view data = find_data_with_gradients(f);
  const std::string_view loop = by_mode ? "a model in evaluation mode keeps" : "a loop keeps";
  const std::string text =
      call != calls.end()
          ? fmt::format("evaluation keeps autograd graphs: {} that no backward follows {} ({})", passes, hold, place)
          : fmt::format("{} autograd graphs{}: {} that no backward has followed {} ({})", loop,
                        data.empty() ? "" : fmt::format(", as '{}' requires gradients", data), passes, hold, place);
  std::vector<std::string> how = lines_for_loop(place, holder, data);
  if (by_mode) how = {fmt::format("with torch.no_grad():  # around {}, if nothing asks for its gradients", place)};
  if (by_mode && trains(f)) {
    how = {fmt::format("with torch.no_grad():  # around the part of {} that evaluates", place)};
    if (!holder.empty()) how.emplace_back("total += loss.item()  # what is added up in it, without its graph");
  }
  if (evaluation != calls.end()) {
    how = {fmt::format("@torch.no_grad()  # above def {}, which {} is in", call->function, call->short_place())};
  }
  const auto of_thread = find_function_of_thread(calls);
  if (of_thread != calls.end() && !of_thread->function.empty()) {
    how = {fmt::format(
        "@torch.no_grad()  # above def {}, which {} is in: each thread has a setting of its own, and this one "
        "runs in a thread",
        of_thread->function, of_thread->short_place())};
  }
  return Reason{
      .text = text + (of_thread != calls.end() ? ", in a thread for which no_grad() of another does not hold" : ""),
      .bytes = kept.bytes,
      .kept_by = holder,
      .fix = "no_grad_in_evaluation",
      .how = how,
      .piles_up = !one};
}

// A model in evaluation mode of a program that has trained: what its layers make is kept for nothing, however large each of it is.
Found find_evaluation_after_training(const ReasonFacts& f) {
  const bool is_sure = f.device.failure->modules_evaluate && f.device.attribution.backward_bytes > 0;
  return is_sure ? find_graphs_in_evaluation(f) : Found{};
}

// Of a program without an optimizer, none of whose passes so far was for a backward pass: nor will this one be.
Found find_graphs_without_backward(const ReasonFacts& f) {
  constexpr uint32_t kFewestPasses = 2;
  constexpr double kMostOfAll = 0.4;
  const OutOfMemory& failure = *f.device.failure;
  const bool is_pass = failure.phase == Phase::forward || failure.phase == Phase::other;
  if (!is_pass || expects_backward(f) || f.device.attribution.backward_bytes > 0) return {};
  if (failure.step <= kFewestPasses) return {};
  if (wants_gradient_of_data(f) || !std::ranges::any_of(f.device.complete.blocks, &StepAllocation::in_graph)) return {};
  const KeptPasses kept = count_passes(f);
  if (!kept.has_layers() || !is_large(f, kept.bytes, kMostOfAll)) return {};
  Found of_several = find_graphs_in_evaluation(f);  // the one before, too, and who keeps it
  if (of_several && of_several->bytes > kept.bytes) return of_several;
  const std::vector<StackCall> calls = parse_stack(failure.stack);
  const std::string place = find_caller_of_model(calls, failure.where);
  return Reason{.text = fmt::format(
                    "evaluation keeps autograd graphs: no backward has followed any of {} forward passes, and this "
                    "one keeps {} for one ({})",
                    failure.step - 1, with_unit(kept.bytes), place),
                .bytes = kept.bytes,
                .fix = "no_grad_in_evaluation",
                .how = {fmt::format("with torch.no_grad():  # around the call of the model in {}", place)}};
}

namespace {

/// Whether this variable is a tensor that each pass makes of that of the one before: a state, and no list or sum of losses.
bool is_state_of_passes(const ReasonFacts& f, const std::string& variable) {
  const auto found = std::ranges::find(f.device.referrers, variable, &Referrer::variable);
  return found != f.device.referrers.end() && !found->is_scalar() && !is_container(fold_subscripts(variable));
}

/// For each loss that a variable of a function has while the next pass runs, as `loss_a` of `(loss_a + loss_b).backward()`.
std::vector<std::string> lines_for_losses(const ReasonFacts& f) {
  constexpr size_t kMaxLines = 3;
  const std::vector<StackCall> calls = parse_stack(f.device.failure->stack);
  std::vector<std::string> lines;
  for (const Referrer& one : f.device.referrers) {
    const bool is_loss = one.is_scalar() && one.nodes >= kSeveralNodes &&
                         !is_container(fold_subscripts(one.variable)) &&
                         find_function(calls, function_of(one.variable)) != calls.end();
    if (is_loss && lines.size() < kMaxLines)
      lines.push_back(fmt::format("{}.backward()  # before the next forward pass; gradients add up, as of the sum",
                                  variable_name(one.variable)));
  }
  return lines;
}

}  // namespace

Found find_several_passes(const ReasonFacts& f) {
  constexpr int64_t kFewestPasses = 4;
  const OutOfMemory& failure = *f.device.failure;
  const KeptPasses kept = count_passes(f);
  const bool learns_data = wants_gradient_of_data(f);
  const std::string holder = find_holder_of_graphs(f);
  if (failure.phase != Phase::forward || (!expects_backward(f) && !learns_data) || kept.count < kFewestPasses ||
      !is_large(f, kept.bytes, kWorthNaming))
    return {};
  const bool is_rollout = is_state_of_passes(f, holder);
  const int64_t passes = std::max<int64_t>(1, kept.count_passes());
  return Reason{.text = fmt::format("{} forward passes before one backward{}: their graphs hold {} ({})", passes,
                                    is_rollout ? ", each from what the one before made, " + holder : "",
                                    with_unit(kept.bytes), short_place(failure.where)),
                .bytes = kept.bytes - (is_rollout ? 0 : kept.bytes / passes),  // that of one pass is needed
                .fix = is_rollout ? "checkpoint_each_pass" : "backward_of_each_pass",
                .how = is_rollout ? std::vector<std::string>() : lines_for_losses(f)};
}

// A loop within one forward pass: a cell of a recurrent layer that runs once for each position, or any layers that do. The whole model
// that runs several times is another matter.
Found find_unrolled_sequence(const ReasonFacts& f) {
  constexpr int64_t kFewestTurns = 16, kTurnsPerPass = 8;
  const OutOfMemory& failure = *f.device.failure;
  const KeptPasses kept = count_passes(f);
  const bool has_cell = std::ranges::any_of(f.device.state.blocks, [](const LiveBlock& block) {
    return block.category == Category::activation && contains(block.made.op, "_cell") && is_recurrent(block.made);
  });
  if (failure.phase == Phase::optimizer || (!has_cell && kept.count * kTurnsPerPass > kept.turns)) return {};
  const std::vector<StackCall> calls = parse_stack(failure.stack);
  if (!trains(f) || find_evaluation(calls) != calls.end()) return {};
  // It trains by another caller, or by far fewer turns.
  if (find_other_caller(calls, failure.first_stack) != calls.end()) return {};
  if (turns_more_than_training(f, kept)) return {};
  const int64_t bytes = kept.sum_of_turns();
  constexpr double kMostOfAll = 0.4;  // else what is made once for the whole sequence takes more
  if (kept.turns < kFewestTurns || !is_large(f, bytes, has_cell ? kWorthNaming : kMostOfAll)) return {};
  std::vector<std::string> how;  // of positions: the row's
  if (!has_cell && !is_recurrent(kept.most)) {
    how = {
        "y = torch.utils.checkpoint.checkpoint(turn, x, use_reentrant=False)  # each turn once more in backward; or "
        "fewer turns",
        std::string(find_fix("truncated_backward")->lines)};
  }
  return Reason{.text = fmt::format(
                    "{} turns of a loop{} run before backward(): the graphs of all of them hold {} ({})", kept.turns,
                    how.empty() ? " (positions of a sequence)" : "", with_unit(bytes), short_place(kept.most)),
                .bytes = bytes,
                .fix = "truncated_backward",
                .how = std::move(how)};
}

namespace {

/// A scalar in whose graph each of so many turns has nodes, "loss" of `loss = loss + f(x)`; or empty.
std::string_view find_sum_of_turns(const ReasonFacts& f, int64_t turns) {
  constexpr int64_t kNodesOfTurn = 2;
  const auto sum = std::ranges::find_if(f.device.referrers, [&](const Referrer& one) {
    return one.is_scalar() && one.nodes >= kNodesOfTurn * turns && !is_container(fold_subscripts(one.variable));
  });
  return sum == f.device.referrers.end() ? std::string_view() : variable_name(sum->variable);
}

}  // namespace

// The same outside of modules: parts of a loss, of each of which a list or a sum keeps the graph.
Found find_graphs_of_loop(const ReasonFacts& f) {
  constexpr int64_t kFewestTurns = 4;
  constexpr size_t kFewestOps = 3, kFewestOpsOfSum = 2;
  if (f.device.failure->phase == Phase::optimizer || !learns(f)) return {};
  std::map<std::tuple<std::string_view, std::string_view, int64_t>, Share> equal;
  for (const LiveBlock& block : f.device.state.blocks) {
    const bool is_of_loop = block.phase == Phase::forward && block.step == f.device.failure->step && is_data(block) &&
                            block.made.module.empty() && !block.pending_free;
    if (is_of_loop) equal[{block.made.op, block.made.source, block.requested_bytes}].add(block);
  }
  struct Results {
    int64_t bytes = 0;
    size_t ops = 0;
    const LiveBlock* largest = nullptr;
  };
  std::map<int64_t, Results> by_turns;
  for (const auto& [key, share] : equal) {
    if (share.count < kFewestTurns) continue;
    for (const int64_t turns : {share.count, share.count + 1}) {  // the last turn has not made all of its own
      Results& results = by_turns[turns];
      results.bytes += share.bytes;
      ++results.ops;
      if (results.largest == nullptr || share.largest->bytes > results.largest->bytes) results.largest = share.largest;
    }
  }
  const auto most = std::ranges::max_element(by_turns, {}, [](const auto& entry) { return entry.second.bytes; });
  if (most == by_turns.end()) return {};
  const auto& [turns, kept] = *most;
  const std::string_view sum = find_sum_of_turns(f, turns);
  if (kept.ops < (sum.empty() ? kFewestOps : kFewestOpsOfSum) || !is_large(f, kept.bytes)) return {};
  return Reason{
      .text = fmt::format("{} turns of a loop keep their graphs until one backward for all of them: {} ({}){}", turns,
                          with_unit(kept.bytes), short_place(kept.largest->made),
                          sum.empty() ? "" : fmt::format("; '{}' adds up what they make", sum)),
      .bytes = kept.bytes,
      .fix = "backward_of_each_pass"};
}

}  // namespace oomdiag
