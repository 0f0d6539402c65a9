#include "extension/record/work_meter.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "extension/environment.h"
#include "extension/record/fork_and_exit.h"
#include "extension/record/place.h"
#include "extension/record/session.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"
#include "profiler/meter_words.h"
#include "profiler/trace/format.h"

// Which calls are metered. An operator calls others: linear calls addmm, which calls empty. The work is done where a kernel for CUDA is
// registered, so the outermost operator that has one is metered, and what it calls is not: that belongs to how the kernel is made, and
// differs between machines. Operators without such a kernel are made of others, which are metered. Convolutions are metered as a whole:
// cuDNN's parts of them do not say what is transposed. Operators that make views are counted alone.
// Autocast calls the operator again with cast inputs: then the inner call is the one.
// A call that goes to Python first, for a tensor subclass (DTensor) or a dispatch mode (selective checkpointing), is made of what Python
// calls: of local shards, or of nothing where a result was kept. A collective is metered where ProcessGroupNCCL starts it (at::kParamCommsCallName), below the operators of c10d.

namespace oomdiag {
namespace {

enum class CallKind : uint8_t { made_of_others, metered, makes_view, does_nothing, collective, functional_collective };

/// What is known of a metered call between its begin and its end.
struct MeteredCall {
  const at::RecordFunction* call = nullptr;
  bool has_gpu_input = false;
  std::string text{};  ///< its line up to the outputs
};

struct MeteredThread {
  MeteredCall open{};                              ///< the calls inside of it are not metered
  const at::RecordFunction* view = nullptr;        ///< the call that makes a view: what it calls belongs to it
  const at::RecordFunction* functional = nullptr;  ///< the call of torch.distributed's functional collectives that runs
  uint64_t next_node = 0;                          ///< nodes of this thread below it have a module
  uint32_t module = 0;                             ///< that of the newest call
  std::unordered_map<const char*, CallKind> kinds;
};
/// That of this thread. Leaked: operators may run while thread_local objects are destroyed (fork_and_exit.h).
MeteredThread& metered_thread() {
  static thread_local MeteredThread* instance = nullptr;
  if (instance == nullptr) instance = new MeteredThread;
  return *instance;
}

using Counts = std::unordered_map<std::string, int64_t>;
/// By thread and number of the node.
using ModuleOfNode = std::map<std::pair<uint64_t, uint64_t>, uint32_t>;

struct WorkMeter {
  std::mutex mutex;
  std::map<uint32_t, Counts> steps;
  size_t lines = 0;       ///< of `steps`
  uint32_t write_at = 2;  ///< the step whose begin is the next reason to write the file
  ModuleOfNode module_of_node;
  ModuleOfNode module_of_older_node;  ///< of the newest kKeptNodes before those
  bool began = false;                 ///< the first forward pass
  bool by_optimizer = false;          ///< steps of optimizers divide `steps`
  std::filesystem::path file;
};
WorkMeter& work_meter() {
  static auto* const instance = new WorkMeter;  // operators may run until the very end
  return *instance;
}

/// Of the newest steps; two are kept whatever they have.
constexpr size_t kKeptLines = 1 << 16;
/// More than a step has. Who keeps the graphs of more nodes than twice that has no modules in their backward passes.
constexpr size_t kKeptNodes = 1 << 17;

/// They take memory or look at it, and start no kernel.
bool starts_no_kernel(std::string_view name) {
  return name.starts_with("aten::empty") || name == "aten::resize_" || name == "aten::set_" ||
         name == "aten::record_stream" || name == "aten::_nested_tensor_size";
}

/// Kernels for CUDA that only call other operators, some of them products, or start a collective.
bool calls_operators(std::string_view name) {
  return name.starts_with("c10d::") || name == "aten::_transformer_encoder_layer_fwd" ||
         name == "aten::_native_multi_head_attention";
}

bool returns_view(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) return false;
  const auto* alias = schema.returns().front().alias_info();
  return alias != nullptr && !alias->isWrite();
}

CallKind find_kind(const at::RecordFunction& call) {
  if (std::string_view(call.name()).starts_with("_c10d_functional::")) return CallKind::functional_collective;
  const auto name = call.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!op) return CallKind::made_of_others;
  const std::string_view text = call.name();
  if (starts_no_kernel(text)) return CallKind::does_nothing;
  if (returns_view(op->schema())) return CallKind::makes_view;
  if (text == "aten::convolution" || text == "aten::convolution_backward" || text == "aten::copy_")
    return CallKind::metered;
  if (calls_operators(text)) return CallKind::made_of_others;
  return op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) ? CallKind::metered : CallKind::made_of_others;
}

/// Kinds are kept by the address of the name: that of a schema stays. A call without a schema has its name in a string of its own, whose
/// address another call may have later; of these only collectives are of interest.
CallKind kind_of_call(const at::RecordFunction& call) {
  if (call.name() == at::kParamCommsCallName) return CallKind::collective;
  const auto [entry, is_new] = metered_thread().kinds.try_emplace(call.name(), CallKind::made_of_others);
  if (is_new) entry->second = find_kind(call);
  return entry->second;
}

/// Autocast casts the inputs and calls it again.
bool is_cast_first(const at::RecordFunction& call) {
  if (!at::autocast::is_autocast_enabled(at::kCUDA)) return false;
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCUDA)) return false;
  const auto name = call.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  return op && op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA);
}

/// Whether `is` holds for a tensor of the value.
template <class Is>
bool any_tensor(const c10::IValue& value, Is is) {
  if (value.isTensor()) return is(value.toTensor());
  return value.isTensorList() && std::ranges::any_of(value.toTensorVector(), is);
}

bool is_for_python(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

/// Python's __torch_dispatch__ takes it, and calls operators of its own.
bool goes_to_python(const at::RecordFunction& call) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return true;
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) return false;
  return std::ranges::any_of(call.inputs(), [](const c10::IValue& value) { return any_tensor(value, is_for_python); });
}

bool is_on_gpu(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

bool has_gpu_tensor(const c10::IValue& value) { return any_tensor(value, is_on_gpu); }

/// Whether elements that follow each other in the last dimension lie apart in memory, as in a transposed matrix: kernels that take elements
/// in the order of the shape are slower then. An expanded dimension is none: its elements are one.
bool is_strided(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) return false;
  for (int64_t i = tensor.dim() - 1; i >= 0; --i) {
    if (tensor.size(i) > 1) return tensor.stride(i) > 1;
  }
  return false;
}

void append_tensor(std::string& text, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    text += '-';
    return;
  }
  text += c10::toString(tensor.scalar_type());
  text += ':' + std::to_string(tensor.element_size()) + ':';
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i == 0 ? "" : "x") + std::to_string(tensor.size(i));
  if (!tensor.is_cuda()) {
    text += "@host";
  } else if (is_strided(tensor)) {
    text += '~';
  }
}

void append_list(std::string& text, const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0, elements = 0;
  const char* dtype = "-";
  for (const at::Tensor& tensor : tensors) {
    if (!is_on_gpu(tensor)) continue;
    dtype = c10::toString(tensor.scalar_type());
    bytes += static_cast<int64_t>(tensor.nbytes());
    if (tensor.dim() > 1) elements += tensor.numel();
  }
  text += "list:" + std::string(dtype) + ':' + std::to_string(tensors.size()) + ':' + std::to_string(bytes) + ':' +
          std::to_string(elements);
}

void append_value(std::string& text, const c10::IValue& value) {
  text += ' ';
  if (value.isTensor()) {
    append_tensor(text, value.toTensor());
  } else if (value.isTensorList()) {
    append_list(text, value.toTensorVector());
  } else if (value.isBool()) {
    text += value.toBool() ? "i:1" : "i:0";
  } else if (value.isInt()) {
    text += "i:" + std::to_string(value.toInt());
  } else if (value.isBoolList()) {
    text += "m:";
    for (const bool flag : value.toBoolList()) text += flag ? '1' : '0';
  } else {
    text += '-';
  }
}

/// The module whose forward pass made the node that runs.
uint32_t module_of(const torch::autograd::Node& node) {
  const WorkMeter& all = work_meter();
  for (const ModuleOfNode* modules : {&all.module_of_node, &all.module_of_older_node}) {
    const auto found = modules->find({node.thread_id(), node.sequence_nr()});
    if (found != modules->end()) return found->second;
  }
  return 0;
}

struct PhaseAndModule {
  const char* phase = "forward";
  uint32_t module = 0;
};

PhaseAndModule locate(const ThreadState& state) {
  const WorkPlace& now = state.place.now();
  WorkMeter& all = work_meter();
  const std::lock_guard lock(all.mutex);
  if (const auto node = torch::autograd::get_current_node()) {
    const bool again = (now.context.flags & kRecomputation) != 0;
    return {again ? "recomputation" : "backward", now.context.module != 0 ? now.context.module : module_of(*node)};
  }
  if (torch::autograd::get_current_graph_task_id() >= 0)
    return {"backward", now.context.module};  // what runs at its end
  if (now.in_optimizer) return {"optimizer", 0};
  all.began = all.began || now.context.module != 0;
  return {all.began ? "forward" : "setup", now.context.module};
}

/// A line up to the inputs.
std::string begin_line(const ThreadState& state, std::string_view name) {
  const PhaseAndModule place = locate(state);
  return std::string(place.phase) + '\t' + std::to_string(place.module) + '\t' + std::string(name) + '\t';
}

/// Nodes that appeared since the last call belong to the module that ran.
void claim_nodes_for_module(MeteredThread& thread) {
  const uint64_t next = at::sequence_number::peek();
  const uint64_t first = std::exchange(thread.next_node, next);
  if (first >= next) return;
  WorkMeter& all = work_meter();
  const std::lock_guard lock(all.mutex);
  all.began = true;
  if (thread.module == 0) return;
  if (all.module_of_node.size() >= kKeptNodes) all.module_of_older_node = std::exchange(all.module_of_node, {});
  const uint64_t id = at::RecordFunction::currentThreadId();
  for (uint64_t number = first; number < next; ++number) all.module_of_node[{id, number}] = thread.module;
}

/// The line of a collective up to its outputs, empty for what is none. Its inputs: tensors, sequence number, group, rank, name, sizes of
/// parts for each rank (two lists), first rank, distance, ranks and, since torch 2.9, whether it is asynchronous (ParamCommsUtils.hpp).
std::string describe_collective(const at::RecordFunction& call, const ThreadState& state, bool is_functional) {
  constexpr size_t kName = 4, kStride = 8, kRanks = 9, kAsync = 10;
  const auto& inputs = call.inputs();
  if (inputs.size() <= kRanks || !inputs[kName].isString() || !inputs[kStride].isInt() || !inputs[kRanks].isInt())
    return {};
  const bool is_async = inputs.size() <= kAsync || !inputs[kAsync].isBool() || inputs[kAsync].toBool();
  std::string text = begin_line(state, "nccl::" + inputs[kName].toStringRef());
  for (const c10::IValue& value :
       {inputs[0], inputs[kRanks], inputs[kStride], c10::IValue(is_functional || !is_async)}) {
    append_value(text, value);
  }
  return text;
}

/// Whether it runs on another stream than the default one: beside what is computed there.
bool is_on_own_stream(const at::RecordFunction& call) {
  for (const c10::IValue& value : call.inputs()) {
    if (!value.isTensor() || !is_on_gpu(value.toTensor())) continue;
    const c10::Device device = value.toTensor().device();
    const c10::impl::VirtualGuardImpl guard(device.type());
    return guard.getStream(device) != guard.getDefaultStream(device);
  }
  return false;
}

std::string describe_begin(const at::RecordFunction& call, const ThreadState& state) {
  std::string name = call.name();
  if (name == "aten::copy_" && is_on_own_stream(call)) name += kOnOwnStream;
  std::string text = begin_line(state, name);
  for (const c10::IValue& value : call.inputs()) append_value(text, value);
  return text;
}

uint32_t steps_over() {
  const TraceHeader& header = session().writer().header();
  return header.step_count.load(std::memory_order_relaxed) * header.step_stride.load(std::memory_order_relaxed);
}

/// Until the first step of an optimizer was over, backward passes divided the steps (step_counter.h): all of that was one. With the lock.
void join_first_steps(WorkMeter& all) {
  if (all.by_optimizer || session().writer().header().steps_by_optimizer.load(std::memory_order_relaxed) == 0) return;
  all.by_optimizer = true;
  Counts first;
  for (const auto& [step, counts] : all.steps) {
    for (const auto& [text, count] : counts) first[text] += count;
  }
  all.lines = first.size();
  all.steps.clear();
  all.steps[1] = std::move(first);
}

/// Whole or not at all: the process may be killed meanwhile. With the lock.
void write_file(WorkMeter& all) {
  join_first_steps(all);
  const std::filesystem::path unfinished = all.file.string() + ".new";
  std::ofstream out(unfinished);
  out << "steps\t" << steps_over() << '\n';
  if (const int64_t ranks = variables::number("LOCAL_WORLD_SIZE", 0); ranks > 0) {
    out << "job\t" << ranks << ' ' << variables::text(variables::kTopology) << '\n';
  }
  for (const auto& [step, counts] : all.steps) {
    for (const auto& [text, count] : counts) {
      const size_t values = text.rfind('\t');
      out << step << '\t' << text.substr(0, values) << '\t' << count << text.substr(values) << '\n';
    }
  }
  out.close();
  std::error_code ignored;
  if (out) std::filesystem::rename(unfinished, all.file, ignored);
}

/// A program that is killed at some step leaves what was known some steps before. With the lock.
void write_from_time_to_time(WorkMeter& all, uint32_t step) {
  if (step < all.write_at) return;
  if (step > 1) write_file(all);
  all.write_at = step < 8 ? step + 1 : 2 * step;
}

void count_call(std::string text) {
  const uint32_t step = steps_over() + 1;
  WorkMeter& all = work_meter();
  const std::lock_guard lock(all.mutex);
  join_first_steps(all);
  write_from_time_to_time(all, step);
  if (++all.steps[step][std::move(text)] == 1) ++all.lines;
  while (all.lines > kKeptLines && all.steps.size() > 2) {
    all.lines -= all.steps.begin()->second.size();
    all.steps.erase(all.steps.begin());
  }
}

std::unique_ptr<at::ObserverContext> begin_metered_call(const at::RecordFunction& call) {
  MeteredThread& thread = metered_thread();
  if (thread.open.call != nullptr || !recording()) return nullptr;
  const bool in_backward = torch::autograd::get_current_node() != nullptr;
  if (!in_backward) claim_nodes_for_module(thread);
  thread.module = thread_state().place.now().context.module;
  const CallKind kind = kind_of_call(call);
  if (kind == CallKind::makes_view && thread.view == nullptr && std::ranges::any_of(call.inputs(), has_gpu_tensor)) {
    thread.view = &call;
    count_call(begin_line(thread_state(), kViews) + " >");
  }
  if (kind == CallKind::functional_collective) thread.functional = &call;
  if (kind == CallKind::collective) {
    std::string text = describe_collective(call, thread_state(), thread.functional != nullptr);
    if (!text.empty())
      thread.open = {.call = &call, .has_gpu_input = has_gpu_tensor(call.inputs()[0]), .text = std::move(text)};
    return nullptr;
  }
  if (kind != CallKind::metered || is_cast_first(call) || goes_to_python(call)) return nullptr;
  thread.open = {.call = &call,
                 .has_gpu_input = std::ranges::any_of(call.inputs(), has_gpu_tensor),
                 .text = describe_begin(call, thread_state())};
  return nullptr;
}

void end_metered_call(const at::RecordFunction& call, at::ObserverContext*) {
  MeteredThread& thread = metered_thread();
  if (thread.view == &call) thread.view = nullptr;
  if (in_forked_child() || !recording()) {
    thread.open = {};
    return;
  }
  if (!torch::autograd::get_current_node()) claim_nodes_for_module(thread);
  if (thread.functional == &call) thread.functional = nullptr;
  if (thread.open.call != &call) return;
  MeteredCall ended = std::exchange(thread.open, {});
  if (std::uncaught_exceptions() > 0) return;  // it did not run: a checkpoint's forward pass stops early
  const auto& outputs = call.outputs();
  if (!ended.has_gpu_input && std::none_of(outputs.begin(), outputs.end(), has_gpu_tensor)) return;
  ended.text += " >";
  for (const c10::IValue& value : outputs) append_value(ended.text, value);
  count_call(std::move(ended.text));
}

void write_at_exit() {
  if (in_forked_child()) return;
  WorkMeter& all = work_meter();
  const std::lock_guard lock(all.mutex);
  write_file(all);
}

}  // namespace

void meter_kernel(std::string_view name, int64_t read_bytes, int64_t written_bytes, bool is_known) {
  if (metered_thread().open.call != nullptr || in_forked_child() || !recording()) return;
  const auto as_tensor = [](int64_t bytes) { return " Byte:1:" + std::to_string(bytes); };
  count_call(begin_line(thread_state(), kKernelPrefix + std::string(name)) + as_tensor(read_bytes) +
             (is_known ? " i:1" : " i:0") + " >" + as_tensor(written_bytes));
}

void start_work_meter(const std::filesystem::path& file) {
  work_meter().file = file;
  std::atexit(write_at_exit);
  auto callback = at::RecordFunctionCallback(begin_metered_call, end_metered_call);
  at::addGlobalCallback(callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace oomdiag
