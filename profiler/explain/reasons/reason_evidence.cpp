#include "profiler/explain/reasons/reason_evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/variable_counts.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/fold_indices.h"
#include "profiler/one_of.h"
#include "profiler/package_paths.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"
#include "profiler/trace/stack_call.h"

namespace oomdiag {

std::string at(const Where& where) {
  const std::string place = where.source.empty() ? std::string() : short_place(where);
  return place.empty() ? std::string() : " at " + place;
}

std::string comment_at(const Where& where) {
  const std::string place = at(where);
  return place.empty() ? std::string() : "  #" + place;
}

void Share::add(const LiveBlock& block) {
  bytes += block.bytes;
  ++count;
  if (largest == nullptr || block.bytes > largest->bytes) largest = &block;
}

const Growth* leading_growth(const ReasonFacts& facts) {
  if (facts.cause == CauseKind::leak && !facts.growths.empty()) return &facts.growths.front();
  const bool large = !facts.growths.empty() && (is_large(facts, facts.growths.front().grown_bytes, 0.2) ||
                                                is_large(facts, sum_grown(facts.growths), 0.4));
  return large || (failure(facts) == nullptr && !facts.growths.empty()) ? &facts.growths.front() : nullptr;
}

bool is_of_package(const StackCall& call) { return is_in_package(call.place); }

std::string name_call(const StackCall& call) {
  if (call.function.starts_with('<')) return std::string(call.short_place());
  return fmt::format("{}(), {}", call.function, call.short_place());
}

namespace {

/// The call of the user's program that leads to the outermost module, or null.
const StackCall* find_call_of_model(const std::vector<StackCall>& calls) {
  const auto is_of_torch = [](const StackCall& one) { return one.function == "_call_impl"; };
  const auto outermost = std::find_if(calls.rbegin(), calls.rend(), is_of_torch).base();
  const auto caller = std::find_if_not(outermost, calls.end(), is_of_package);
  return outermost == calls.begin() || caller == calls.end() ? nullptr : &*caller;
}

}  // namespace

std::string find_caller_of_model(const std::vector<StackCall>& calls, const Where& failed) {
  const StackCall* const caller = find_call_of_model(calls);
  return caller == nullptr ? short_place(failed) : name_call(*caller);
}

bool has_other_caller(const OutOfMemory& failed) {
  const std::vector<StackCall> calls = parse_stack(failed.stack), first = parse_stack(failed.first_stack);
  const StackCall *const now = find_call_of_model(calls), *const then = find_call_of_model(first);
  return now != nullptr && then != nullptr && now->place != then->place;
}

bool expects_backward(const ReasonFacts& facts) {
  constexpr uint32_t kFirstPasses = 2;  // more of them went by without it
  const OutOfMemory* const failed = failure(facts);
  return trains(facts) || (failed != nullptr && failed->names_backward && !failed->modules_evaluate &&
                           (failed->step <= kFirstPasses || facts.device.attribution.backward_bytes > 0));
}

bool learns(const ReasonFacts& facts) {
  const auto& step = facts.device.step_allocations.blocks;
  return trains(facts) || facts.device.attribution.backward_bytes > 0 ||
         std::ranges::any_of(step, [](const StepAllocation& block) { return block.in_graph; });
}

bool runs_checkpoints(const ReasonFacts& facts) {
  const auto is_of_checkpoint = [](const StepAllocation& block) { return contains(block.made.op, "Checkpoint"); };
  return facts.device.packed_tensors > 0 ||
         (failure(facts) != nullptr && contains(failure(facts)->stack, "utils/checkpoint.py")) ||
         std::ranges::any_of(facts.device.step_allocations.blocks, is_of_checkpoint);
}

std::optional<bool> builds_graph(const ReasonFacts& facts) { return builds_graph(facts.device.step_allocations); }

std::optional<bool> fails_in_graph(const ReasonFacts& facts) {
  return failure(facts) != nullptr && failure(facts)->no_grad ? false : builds_graph(facts);
}

bool fails_in(const ReasonFacts& facts, std::initializer_list<std::string_view> ops) {
  const OutOfMemory* failed = failure(facts);
  return failed != nullptr && any_op(failed->where, ops);
}

bool is_of_models(Category category) {
  return category == Category::parameter || category == Category::gradient || category == Category::optimizer_state;
}

bool is_of_called_models(const LiveBlock& block) { return is_of_models(block.category) && !block.uncalled; }

Share sum_models(const ReasonFacts& facts) { return sum_blocks(facts, is_of_called_models); }

std::set<int64_t> find_sizes_of_weights(const ReasonFacts& facts) {
  constexpr int64_t kTelling = 1 << 20;  // smaller ones are of usual sizes
  std::vector<Where> data;               // of which backward makes gradients, too, by what made them
  for (const Referrer& one : facts.device.referrers) {
    if (one.wants_gradient && std::ranges::find(data, one.made) == data.end()) data.push_back(one.made);
  }
  std::set<int64_t> called, uncalled;
  bool any_called = false;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_weight = block.category == Category::parameter || block.category == Category::optimizer_state;
    const bool is_of_step = block.step > 0 && !block.uncalled;
    const bool may_be_data = block.name.empty() && (is_of_step || std::ranges::find(data, block.made) != data.end());
    if (!is_weight || may_be_data) continue;
    any_called |= !block.uncalled;
    if (block.requested_bytes >= kTelling) (block.uncalled ? uncalled : called).insert(block.requested_bytes);
  }
  return any_called ? called : uncalled;
}

bool is_of_as_many(int64_t a, int64_t b) {
  const auto [small, large] = std::minmax(a, b);
  for (const int64_t ratio : {1, 2, 4, 8}) {
    if (std::abs(large - ratio * small) < kMinBlockBytes * ratio) return true;
  }
  return false;
}

std::string_view container_name(std::string_view variable) {
  const std::string_view name = variable_name(variable);
  return name.substr(0, name.find('['));
}

std::string_view module_of(const Referrer* referrer) {
  if (referrer == nullptr) return {};
  const std::string_view name = variable_name(referrer->variable);
  const bool is_of_module = name.ends_with("_parameters") || name.ends_with("_buffers");
  const size_t end = std::min({name.find("._modules["), name.rfind("._parameters"), name.rfind("._buffers")});
  return is_of_module && end != name.npos ? name.substr(0, end) : std::string_view();
}

std::string keeper_of_gradients(const Share& gradients) {
  return fmt::format("parameters, as their .grad: {} gradients, {}", gradients.count, with_unit(gradients.bytes));
}

std::string_view outermost_module(std::string_view module) {
  const std::string_view first = module.substr(0, module.find('.'));
  return first.find_first_not_of("0123456789") == first.npos ? std::string_view() : first;
}

const OutOfMemory* failure_outside_of_layers(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  const bool is_outside = failed != nullptr && failed->where.module.empty() && failed->where.node.empty();
  return is_outside ? failed : nullptr;
}

const OutOfMemory* failed_copy(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  return failed != nullptr && is_copy(failed->where.op) && failed->where.module.empty() ? failed : nullptr;
}

std::string_view place_of(std::string_view variable) {
  constexpr std::string_view kIn = "' in ";
  const size_t at = variable.rfind(kIn);
  return at == variable.npos ? std::string_view() : variable.substr(at + kIn.size());
}

std::string_view function_of(std::string_view variable) {
  const std::string_view place = place_of(variable);
  const size_t end = place.find(" (");
  return end == place.npos ? std::string_view() : place.substr(0, end);
}

bool wants_gradient_of_data(const ReasonFacts& facts) {
  // Of variables of packages' functions nothing is known: of no module is a leaf of a graph that torch.cat() made.
  const auto is_leaf_of_step = [&](const LiveBlock& block) {
    return block.category == Category::parameter && block.name.empty() && !block.trained && !block.saved_by.empty() &&
           joins(block.made);
  };
  return std::ranges::any_of(facts.device.referrers, &Referrer::wants_gradient) ||
         std::ranges::any_of(facts.device.state.blocks, is_leaf_of_step);
}

std::string_view variable_name(std::string_view variable) {
  const size_t begin = variable.find('\'') + 1, end = variable.find('\'', begin);
  return begin == 0 || end == variable.npos ? std::string_view() : variable.substr(begin, end - begin);
}

bool is_garbage(std::vector<const LiveBlock*> let_go) {
  constexpr size_t kFew = 4, kMax = 256;  // pairs of them are looked at
  std::ranges::sort(let_go, {}, &LiveBlock::born);
  if (let_go.size() > kMax) let_go.resize(kMax);
  size_t oldest_first = 0, pairs = 0;
  for (size_t i = 0; i < let_go.size(); ++i) {
    for (size_t k = i + 1; k < let_go.size(); ++k) {
      oldest_first += let_go[i]->freed < let_go[k]->freed ? 1 : 0;
      ++pairs;
    }
  }
  return let_go.size() >= kFew && oldest_first * 3 >= pairs * 2;
}

// Python's collector does not see what autograd refers to: a hook of a node, or the node of a write in place.
namespace {

/// `text` goes on behind "reference cycles".
Reason unreachable(const std::string& what, int64_t bytes, const std::string& text) {
  return {.text = fmt::format("no variable leads to {}: reference cycles{}", what, text),
          .bytes = bytes,
          .kept_by = "objects that refer to one another",
          .piles_up = true};
}

}  // namespace

Reason reference_cycle(const std::string& what, int64_t bytes, std::string_view after) {
  Reason reason = unreachable(what, bytes, ", which wait for Python's garbage collector");
  reason.fix = "collect_garbage";
  reason.how = {
      fmt::format("gc.collect()  # after each {}; or no cycle: weakref.ref(self) in callbacks and hooks", after)};
  if (after == "step")
    reason.how.emplace_back(
        "x.grad = gradient.detach()  # one that is assigned with its graph refers to its own tensor");
  return reason;
}

Reason cycle_of_graphs(const std::string& what, int64_t bytes, const PlaceCurve* write) {
  const std::string line = write == nullptr ? "" : at(write->where);
  Reason reason = unreachable(
      what, bytes,
      fmt::format(
          ", which wait for Python's garbage collector, or for ever where they go through a hook of autograd or a "
          "write in place{}",
          write == nullptr ? "" : fmt::format(", as {}{}", write->where.op, line)));
  reason.fix = "break_cycle";
  if (write != nullptr) {
    reason.how = {
        fmt::format("y = a * b  # a new tensor in place of the write{}, as of a *= b: its graph keeps a view of "
                    "the tensor that is written into, which keeps the graph; or of that view .clone()",
                    line),
        "with torch.no_grad():  # around it, where nothing differentiates what is written"};
  }
  return reason;
}

bool lets_request_through(const ReasonFacts& facts, int64_t bytes) {
  const MemoryState& state = facts.device.state;
  return requested_bytes(facts) <= state.free_bytes + state.reserved_bytes - state.allocated_bytes + bytes;
}

bool is_copy(std::string_view op) { return is_one_of(op, {"aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda"}); }

int64_t requested_bytes(const ReasonFacts& facts) {
  return facts.device.failure ? facts.device.failure->requested_bytes : 0;
}

bool is_large(const ReasonFacts& facts, int64_t bytes, double part) {
  const int64_t all = facts.device.state.allocated_bytes + requested_bytes(facts);
  return bytes > 0 && static_cast<double>(bytes) >= part * static_cast<double>(all);
}

bool trains(const ReasonFacts& facts) {
  return std::ranges::any_of(facts.device.state.blocks, [](const LiveBlock& block) { return block.trained; });
}

bool is_data(const LiveBlock& block) {
  return !block.pending_free && !is_of_models(block.category) && block.category != Category::buffer &&
         block.category != Category::workspace;
}

Share sum_alike(const ReasonFacts& facts, int64_t bytes) {
  Share alike = sum_blocks(
      facts, [&](const LiveBlock& block) { return is_data(block) && is_of_as_many(block.requested_bytes, bytes); });
  if (is_of_as_many(requested_bytes(facts), bytes)) {
    alike.bytes += requested_bytes(facts);
    ++alike.count;
  }
  return alike;
}

bool any_op(const Where& where, std::initializer_list<std::string_view> ops) {
  return is_one_of(where.op, ops) || is_one_of(where.inner, ops);
}

bool makes_values(const Where& where) {
  return is_one_of(where.op, {"aten::zeros", "aten::empty", "aten::ones", "aten::full"});
}

bool repeats(const Where& where) { return any_op(where, {"aten::repeat", "aten::repeat_interleave", "aten::tile"}); }

bool joins(const Where& where) { return any_op(where, {"aten::cat", "aten::stack", "aten::hstack", "aten::vstack"}); }

std::string comma_shape(const LiveBlock& block) {
  return block.shape.empty() ? std::string() : fmt::format(", {}", block.shape);
}

bool gathers(const Where& where) {
  return any_op(where, {"aten::index", "aten::index_select", "aten::gather", "aten::take", "aten::repeat",
                        "aten::repeat_interleave"});
}

std::vector<std::string> lines_for_rows() {
  return {
      "for part in index.split(1024): f(x[part])  # and reduce each part, or .cpu(), before the next",
      "x.expand(beams, -1, -1)  # in place of repeat(): a view",
      "y = adjacency @ x  # where rows are summed up afterwards (index_add, scatter): a sparse matrix makes none of "
      "them"};
}

bool is_variable_of_forward(std::string_view variable) { return contains(variable, " in forward ("); }

bool is_appended_to(std::string_view variable) {
  return variable.starts_with("list ") || variable.starts_with("deque ");
}

namespace {

/// In the name of a variable: one of the items of a list.
constexpr std::string_view kAny = "[*]";

/// In the name of a variable: the keys and values of a generation, as transformers calls them.
constexpr std::string_view kCache = "past_key_values";

}  // namespace

std::string for_each_item(std::string_view name, const std::function<std::string(const std::string& item)>& statement) {
  constexpr std::string_view kItems = "abcd";  // of the lists on the way, outermost first
  size_t at = name.find(kAny);
  if (at == name.npos) return statement(std::string(name));
  std::string items(name.substr(0, at));
  std::string loops;
  for (size_t depth = 0; at != name.npos; ++depth) {
    name.remove_prefix(at + kAny.size());
    at = name.find(kAny);
    if (at == name.npos) break;
    if (depth + 1 == kItems.size()) return {};
    loops += fmt::format(" for {} in {}", kItems[depth], items);
    items = fmt::format("{}{}", kItems[depth], name.substr(0, at));
  }
  const std::string all = loops.empty() ? items : fmt::format("(x{} for x in {})", loops, items);
  return fmt::format("for _each in {}: {}", all, statement(fmt::format("_each{}", name)));
}

std::string assign_each(std::string_view name, const std::function<std::string(const std::string& item)>& value) {
  if (!name.ends_with(kAny))
    return for_each_item(name, [&](const std::string& item) { return fmt::format("{} = {}", item, value(item)); });
  name.remove_suffix(kAny.size());
  return for_each_item(
      name, [&](const std::string& list) { return fmt::format("{0}[:] = [{1} for x in {0}]", list, value("x")); });
}

std::string_view object_of(std::string_view name) {
  return name.substr(0, name.find('.') == name.npos ? 0 : name.rfind('.'));
}

std::string line_for_hook(std::string_view referrer) {
  struct Kind {
    std::string_view dict, function;
  };
  constexpr Kind kKinds[] = {{"_forward_pre_hooks", "register_forward_pre_hook"},
                             {"_forward_hooks", "register_forward_hook"},
                             {"_backward_pre_hooks", "register_full_backward_pre_hook"},
                             {"_backward_hooks", "register_full_backward_hook"}};
  const std::string_view name = variable_name(referrer);
  const auto kind = std::ranges::find_if(
      kKinds, [&](const Kind& one) { return name.ends_with(one.dict) || contains(name, std::string(one.dict) + "["); });
  if (kind == std::end(kKinds)) return {};
  return fmt::format(
      "handle = module.{}(hook)  # and handle.remove() when it has served: a module keeps its hooks, and these what "
      "they refer to",
      kind->function);
}

std::vector<std::string> lines_for_kept(std::string_view referrer, bool of_weights) {
  const std::string_view name = variable_name(referrer);
  if (const size_t cache = name.find(kCache); cache != name.npos && referrer.starts_with("attribute ")) {
    const size_t end = cache + kCache.size();
    return {assign_each(as_written(name.substr(0, name.find_first_not_of("\"]", end))),
                        [](const std::string&) { return "None"; }) +
            "  # a cache of keys and values has served when generate() returns"};
  }
  std::vector<std::string> lines{line_for_kept(referrer, of_weights)};
  const std::string_view object = object_of(name);
  if (referrer.starts_with("list ") && !object.empty() && name.find('[') == name.npos && !name.starts_with("self.")) {
    lines.push_back(fmt::format(
        "{0}.clear()  # once they have been read: an object that collects, as a metric: {1}.reset()", name, object));
  }
  return lines;
}

std::string line_for_kept(std::string_view referrer, bool of_weights) {
  if (std::string hook = line_for_hook(referrer); !hook.empty()) return hook;
  const std::string_view name = variable_name(referrer);
  if (const size_t key = name.find(kAnyKey); key != name.npos)
    return fmt::format(
        "{}.pop(key)  # entries that have served, or a limit on how many there are: each key has its own",
        as_written(name.substr(0, key)));
  if (referrer.starts_with(kCacheOfResults))
    return fmt::format("{}.cache_clear()  # functools.lru_cache keeps arguments and results, of a method self, too",
                       name);
  if (name.ends_with(".grad"))
    return assign_each(as_written(name), [](const std::string&) { return "None"; }) +
           "  # after each step; or x = x.detach() before x.requires_grad_(), which changes the caller's own data";
  if (contains(referrer, kOfFunctions))
    return fmt::format(
        "{}.clear()  # before new functions go there, or without those that have served: each keeps what its closure, "
        "its defaults and its self refer to; or let them refer to x.detach().cpu()",
        as_written(name));
  const bool is_attribute = referrer.starts_with("attribute ");
  const bool is_one_of_many = name.find(kAny) != name.npos;
  const std::string kept = name.empty() || (is_one_of_many && !is_attribute) ? "kept" : as_written(name);
  const std::string_view value = of_weights ? "{k: w.cpu() for k, w in state.items()}" : "x.detach().cpu()";
  const std::string_view scalar = of_weights ? "" : "  # of a scalar: x.item(); where it is read again: .to(device)";
  const size_t module = name.find("._modules[");
  if (module != name.npos && referrer.starts_with("dict ")) {
    const std::string_view models = container_name(referrer).substr(0, module);
    const size_t inner = name.rfind("._modules[");
    const size_t begin = inner + std::string_view("._modules[").size(), end = name.find(']', begin);
    if (name.substr(0, module).find('[') == name.npos && inner > module &&
        end != name.npos)  // a model that has more modules each time
      return for_each_item(
          fmt::format("{}[{}]", as_written(name.substr(0, inner)), name.substr(begin, end - begin)),
          [](const std::string& item) { return fmt::format("del {}  # modules that have served", item); });
    return fmt::format(
        "{}.clear()  # or without the models that have served: it keeps whole models; model.cpu() to keep one", models);
  }
  if (name.ends_with(".state") && referrer.starts_with("defaultdict ") && name.find('[') == name.npos)
    return fmt::format(
        "del {}[old]  # of each parameter that another one replaces: an optimizer keeps its state, and "
        "with it the parameter and its gradient",
        as_written(name));
  if (name.ends_with(".state") && name.find('[') != name.npos)
    return fmt::format("{}.clear()  # optimizers of trainings that have ended, with what they trained",
                       container_name(referrer));
  if (referrer.starts_with("OrderedDict "))
    return for_each_item(as_written(name), [](const std::string& cache) {
      return fmt::format("len({0}) > 16 and {0}.popitem(last=False)  # a bound: the oldest go first; or .cpu()", cache);
    });
  if (referrer.starts_with("generator "))
    return "del x  # before each yield: a generator that waits keeps its variables; or generator.close()";
  if (const size_t item = name.find("[*]."); item != name.npos && !is_attribute && !of_weights)
    return fmt::format("kept.append(x.detach().cpu())  # or del {}[:-1], where these objects have served",
                       as_written(name.substr(0, item)));
  if (referrer.starts_with("dict ") || referrer.starts_with("defaultdict "))
    return fmt::format("{}[key] = {}{}", kept, value, scalar);
  if (is_attribute && is_one_of_many && !of_weights)
    return assign_each(kept, [](const std::string& item) { return item + ".detach().cpu()"; });
  if (is_attribute) return fmt::format("{} = {}{}", kept, value, scalar);
  if (referrer.starts_with("set ")) return fmt::format("{}.add({}){}", kept, value, scalar);
  const bool is_list = is_appended_to(referrer);
  return fmt::format("{}.append({}){}", is_list ? kept : std::string("kept"), value, scalar);
}

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

namespace {

/// The variable that leads to most parameters, as the program writes it, and is not `other`; or empty.
std::string find_model_variable(const ReasonFacts& facts, std::string_view other) {
  VariableCounts models;
  for (const Referrer& one : facts.device.referrers) {
    const std::string_view model = module_of(&one);
    if (!model.empty() && model != other) models.add(model, 1);
  }
  return as_written(models.most());
}

}  // namespace

std::vector<std::string> lines_for_next_model(const ReasonFacts& facts, std::string_view comes, std::string_view next) {
  const std::string model = find_model_variable(facts, next);
  const bool has_states = sum_category(facts, Category::optimizer_state).count > 0;
  if (model.find_first_of(".[") != model.npos) {
    return lines_for_models(facts, fmt::format("{0} = None  # before the next one {1}{2}; to keep it: {0}.cpu()", model,
                                               comes, has_states ? ", and no optimizer of it" : ""));
  }
  return lines_for_models(
      facts, fmt::format("del {}{}  # before the next one {}; of attributes: self.model = {}None; to keep it: "
                         "model.cpu()",
                         model.empty() ? "model" : model, has_states ? ", optimizer" : "", comes,
                         has_states ? "self.optimizer = " : ""));
}

std::string beside_largest(const ReasonFacts& facts, int64_t bytes) {
  constexpr int64_t kManyTimes = 4;
  const Share others = sum_blocks(facts, is_data);
  const Referrer* const referrer = others.largest == nullptr ? nullptr : facts.referrers.find(*others.largest);
  if (referrer == nullptr) return {};
  const LiveBlock& other = *others.largest;
  if (other.requested_bytes * 5 >= bytes * 4) {
    const std::string from = is_copy(other.made.op) ? ", which is copied to the GPU as a whole"
                                                    : ", which " + std::string(other.made.op) + " makes";
    return fmt::format(", beside {} of {}{}{}{}", referrer->variable, with_unit(other.requested_bytes),
                       comma_shape(other), other.made.op.empty() ? "" : from,
                       other.made.op.empty() ? "" : at(other.made));
  }
  const int64_t times = bytes / std::max<int64_t>(1, other.requested_bytes);
  if (times < kManyTimes) return {};
  return fmt::format(", {} times as large as {}{}", times, referrer->variable, comma_shape(other));
}

std::string name_padding(const PaddedData& data) {
  return fmt::format("{} % of {}, {}, is padding", 100 - (data.per_mille + 5) / 10, data.variable, data.shape);
}

std::vector<std::string> lines_for_longest_sequences(const PaddedData& data) {
  const std::string_view name = variable_name(data.variable);
  return {fmt::format("{0} = {0}[..., :{1}]  # the longest cut, or left out as the data are loaded",
                      name.find_first_of(".[") == name.npos ? name : "x", std::max<int64_t>(1, data.longest / 4)),
          "# or batches of sequences of about one length: sorted by it, group_by_length=True"};
}

bool is_of_attention(const Where& where) {
  const auto names = [](std::string_view name) { return contains_one_of(name, {"attn", "ttention", "cache_utils"}); };
  return names(where.module) || names(where.inner_source);
}

bool is_recurrent(const Where& where) { return contains_one_of(where.op, {"lstm", "gru", "rnn"}); }

}  // namespace oomdiag
