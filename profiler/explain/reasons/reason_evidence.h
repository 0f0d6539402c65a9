#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/explain/facts/growth.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/replay/history.h"
#include "profiler/trace/stack_call.h"

// What several rows of kReasons look at.

namespace oomdiag {

/// " at train.py:31", or empty.
std::string at(const Where& where);

/// The same as a comment of Python.
std::string comment_at(const Where& where);

/// Bytes of the live blocks for which something holds, and the largest of them.
struct Share {
  int64_t bytes = 0;
  int64_t count = 0;
  const LiveBlock* largest = nullptr;

  void add(const LiveBlock& block);
  /// Where the largest was made.
  Where made() const { return largest != nullptr ? largest->made : Where{}; }
};

template <class Holds>
Share sum_blocks(const ReasonFacts& facts, const Holds& holds) {
  Share share;
  for (const LiveBlock& block : facts.device.state.blocks) {
    if (!block.pending_free && holds(block)) share.add(block);
  }
  return share;
}

/// The OOM that ended the program, or null.
inline const OutOfMemory* failure(const ReasonFacts& facts) {
  return facts.device.failure ? &*facts.device.failure : nullptr;
}

/// The same where a line of the program asked by itself, and no module or node of autograd did; else null.
const OutOfMemory* failure_outside_of_layers(const ReasonFacts& facts);

/// The same where it was to copy a tensor, to the GPU or to another type, outside of layers; else null.
const OutOfMemory* failed_copy(const ReasonFacts& facts);

/// Whether both are of one op at one line.
inline bool is_same_call(const Where& a, const Where& b) { return a.op == b.op && a.source == b.source; }

/// Where it was requested.
inline Where failed_in(const ReasonFacts& facts) {
  return facts.device.failure ? facts.device.failure->where : Where{};
}

/// Those of one category.
inline Share sum_category(const ReasonFacts& facts, Category category) {
  return sum_blocks(facts, [&](const LiveBlock& block) { return block.category == category; });
}

/// The growth that stands first, if it or all of them hold a large part; else null.
const Growth* leading_growth(const ReasonFacts& facts);

/// Whether the call is one of a package, and none of the user's program.
bool is_of_package(const StackCall& call);

/// "train(), train.py:40"; of what is no function the line alone.
std::string name_call(const StackCall& call);

/// Who calls the outermost module that runs; where none does, the line that failed.
std::string find_caller_of_model(const std::vector<StackCall>& calls, const Where& failed);

/// Whether another line of the program calls the model than the one by which the failing line was first reached: training, mostly.
bool has_other_caller(const OutOfMemory& failed);

/// Whether a backward pass is to come: an optimizer has parameters, or a function that led to the failure has the word backward in it; not
/// of a pass in evaluation mode, which may stand in the same function as the training.
bool expects_backward(const ReasonFacts& facts);

/// Whether the program trains, has run backward, or builds a graph.
bool learns(const ReasonFacts& facts);

/// Whether a forward pass of its step made it, and recorded it for backward.
inline bool is_of_forward_graph(const StepAllocation& block) {
  return block.is_of_step() && block.in_graph && block.phase == Phase::forward;
}

/// Whether something in the step that failed is checkpointed, or other hooks pack what nodes save.
bool runs_checkpoints(const ReasonFacts& facts);

/// Whether the step that failed builds a graph; nothing where it has made nothing that would show it.
std::optional<bool> builds_graph(const ReasonFacts& facts);

/// The same of what failed: nothing that runs without gradients is of a graph, whatever else the step builds.
std::optional<bool> fails_in_graph(const ReasonFacts& facts);

/// Whether it was requested in one of `ops`.
bool fails_in(const ReasonFacts& facts, std::initializer_list<std::string_view> ops);

/// Parameters, gradients and the optimizer's state.
bool is_of_models(Category category);

/// Whether it is of a model that the program has used.
bool is_of_called_models(const LiveBlock& block);

Share sum_models(const ReasonFacts& facts);

inline constexpr int64_t kDistinctBytes = 1 << 20;  ///< smaller tensors are of usual sizes

/// Requested bytes of the large tensors among these; where no model was called yet, of those that are to be.
std::set<int64_t> find_sizes_of_weights(const ReasonFacts& facts);

/// Whether two sizes are of as many elements, in types of 1 to 8 bytes.
bool is_of_as_many(int64_t a, int64_t b);

/// The data that lives of as many elements as a tensor of so many bytes, and what was requested, if it has as many.
Share sum_alike(const ReasonFacts& facts, int64_t bytes);

/// "history" of "list 'history' in train.py", as the program calls it; or empty.
std::string_view variable_name(std::string_view variable);

/// "train (train.py:17)" of "variable 'loss' in train (train.py:17)"; of a module's variables "train.py".
std::string_view place_of(std::string_view variable);

/// "train" of the same; empty of variables of a module.
std::string_view function_of(std::string_view variable);

/// Whether requires_grad_() was called for data: of an image that is optimized or explained, or of the state that a simulation begins
/// with. A backward pass is to come, in evaluation mode, too.
bool wants_gradient_of_data(const ReasonFacts& facts);

/// The line for gradients of data, as of an attribution, where no weight is trained: those of some examples do not need the others.
inline constexpr const char* kGradientsOfParts =
    "gradients = torch.cat([torch.autograd.grad(model(part).sum(), part)[0] for part in x.split(8)])  # as far as "
    "examples do not mix";

/// Of autograd, that a variable leads to: fewer may be those of one result that is used up.
inline constexpr int64_t kSeveralNodes = 8;

/// Whether it is a variable of a module's forward(): each call makes it anew.
bool is_variable_of_forward(std::string_view variable);

/// The same of the outermost container alone: "nets" of "nets[0].seen".
std::string_view container_name(std::string_view variable);

/// "model" of "dict 'model._modules[0]._parameters' in train.py": the variable of a module that a parameter or a buffer belongs
/// to, whether the module was ever called or not. Empty where the referrer is none of a module.
std::string_view module_of(const Referrer* referrer);

/// The variable that leads to a tensor; empty where none is known.
inline std::string variable_of(const Referrer* referrer) {
  return std::string(referrer == nullptr ? std::string_view() : referrer->variable);
}

/// Who keeps these: "parameters, as their .grad: 24 gradients, 1.50 GiB".
std::string keeper_of_gradients(const Share& gradients);

/// "backbone" of "backbone.layers.0.linear1"; empty of "0.conv": other models have modules with numbers, too.
std::string_view outermost_module(std::string_view module);

/// Whether Python's garbage collector freed these, and not a list that ended: the collector frees the oldest first, a list its last
/// item. Of models in a list the parameters of each go in their order, so all pairs count.
bool is_garbage(std::vector<const LiveBlock*> let_go);

/// Objects that wait for Python's garbage collector; `what` they hold, and `after` what they are left behind, as each step.
Reason reference_cycle(const std::string& what, int64_t bytes, std::string_view after = "step");

/// The same of autograd's graphs, which no collector sees in C++; where `write` is known, an op in place that keeps its own graph.
Reason cycle_of_graphs(const std::string& what, int64_t bytes, const PlaceCurve* write);

/// Whether the request would be served with so many bytes more.
bool lets_request_through(const ReasonFacts& facts, int64_t bytes);

/// Whether it is a tensor of the program's work, in use: of no model, and no buffer or workspace.
bool is_data(const LiveBlock& block);

/// Whether one of `ops` made it, or ran inside of what did.
bool any_op(const Where& where, std::initializer_list<std::string_view> ops);

/// Whether it makes a tensor that is filled later: its type is the default one where nobody chose another.
bool makes_values(const Where& where);

/// Whether it repeats its tensor.
bool repeats(const Where& where);

/// Whether it joins tensors to one.
bool joins(const Where& where);

/// ", [64, 32] float32", or empty where the shape is not known.
std::string comma_shape(const LiveBlock& block);

/// Whether a module or a file that is named after attention, or the cache of one, made it.
bool is_of_attention(const Where& where);

/// Whether it is an op of a recurrent layer, or of one cell of it.
bool is_recurrent(const Where& where);

/// Whether it takes rows, some of them several times.
bool gathers(const Where& where);

/// To write where a derivative is recorded, and nothing differentiates it.
inline constexpr const char* kWithoutCreateGraph =
    "torch.autograd.grad(y, x, retain_graph=True)  # create_graph=False, if nothing differentiates the result once "
    "more";

/// "74 % of variable 'codes' in main (lm.py:9), [8, 4, 3506] int64, is padding".
std::string name_padding(const PaddedData& data);

/// Lines to write where a few sequences are far longer than the others.
std::vector<std::string> lines_for_longest_sequences(const PaddedData& data);

/// Lines to write where rows are copied.
std::vector<std::string> lines_for_rows();

/// `otherwise`, after the line that empties a cache of function results where a variable leads to these models by one.
std::vector<std::string> lines_for_models(const ReasonFacts& facts, const std::string& otherwise);

/// The same before the `next` model, a variable where one has it, `comes`, as it "is made".
std::vector<std::string> lines_for_next_model(const ReasonFacts& facts, std::string_view comes,
                                              std::string_view next = {});

/// Whether the variable is a list or a deque, to which results are appended.
bool is_appended_to(std::string_view variable);

/// `statement` of the item that `name` names; of "nets[*].seen" in a loop: "for _each in nets: " and that of "_each.seen". Empty for lists
/// of lists of lists of lists of lists.
std::string for_each_item(std::string_view name, const std::function<std::string(const std::string& item)>& statement);

/// The same of an assignment; of items of a list themselves, "nets[*]", the list gets new ones.
std::string assign_each(std::string_view name, const std::function<std::string(const std::string& item)>& value);

/// "metric" of "metric.preds": the object that has the attribute; empty of a plain name.
std::string_view object_of(std::string_view name);

/// The line to write where a hook of a module keeps tensors, by the name that a referrer gives to them; else empty.
std::string line_for_hook(std::string_view referrer);

/// The line to write where the program keeps tensors, by the name that a referrer gives to them.
std::string line_for_kept(std::string_view referrer, bool of_weights);

/// The same, and what else may be written.
std::vector<std::string> lines_for_kept(std::string_view referrer, bool of_weights);

/// Whether an op copies its input as it is, perhaps into another type or from the host.
bool is_copy(std::string_view op);

/// ", beside variable 'x' in f (train.py:3) of 2.00 GiB, …": the largest tensor that was there before, where a variable has it and it tells
/// something about one of `bytes`: it is as large, or that is many times as large. Else empty.
std::string beside_largest(const ReasonFacts& facts, int64_t bytes);

}  // namespace oomdiag
