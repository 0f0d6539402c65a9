#include "extension/record/graph_walk.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <functional>
#include <string>
#include <typeinfo>
#include <unordered_set>
#include <vector>

#include "extension/record/allocator_hooks.h"
#include "extension/record/newest_nodes.h"
#include "extension/record/op_callbacks.h"
#include "extension/record/python.h"
#include "extension/record/python_node.h"
#include "extension/record/running_tasks.h"
#include "extension/record/session.h"
#include "extension/record/steady.h"
#include "extension/record/tensor_event.h"
#include "extension/record/thread_numbers.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"

// What does autograd keep for backward? Every built-in node can list its saved variables to a visitor that PyTorch made for
// compiled autograd (Node::compiled_args); the visitor needs no Python and unpacks nothing that user hooks packed (that of 2.6
// does: there nodes are not visited once a program has such hooks).
//
// Rules, each of which was broken once: a node written in Python is not visited, which would call the program's own functions,
// and its saved variables are read only with the GIL; no strong reference outlives
// the visit, else release_variables() frees nothing and we cause the OOM; a node may throw (modified in place, already
// released), which costs only that node; nothing of this while another thread executes the graph.

namespace oomdiag {

namespace {

namespace autograd = torch::autograd;
namespace compiled = torch::dynamo::autograd;

constexpr uint64_t kNoTask = ~uint64_t{0};  ///< of a walk that no backward pass begins

/// How many there were in this process.
std::atomic<uint64_t> walks_begun = 0;

int64_t thread_cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

/// `flags`: kGraphUnchanged, or none.
void write_graph_begin(const ThreadState& state, uint64_t task, uint16_t flags) {
  Event event = state.event(EventKind::graph_begin);
  event.detail = task;
  event.flags = flags;
  session().writer().write(event);
}

/// Walks a graph once and writes what its nodes hold.
class Walk {
 public:
  explicit Walk(ThreadState& state) : state_(state) {}

  void begin(uint64_t task) {
    walks_begun.fetch_add(1, std::memory_order_relaxed);
    write_graph_begin(state_, task, 0);
  }

  /// It ends when it has taken so much of this thread's CPU time.
  void limit(int64_t cpu_ns) { ends_at_ = thread_cpu_ns() + cpu_ns; }
  bool is_cut() const { return is_cut_; }
  size_t nodes() const { return seen_.size(); }

  void from(NodePtr root) {
    std::vector<NodePtr> waiting;
    waiting.push_back(std::move(root));
    while (!waiting.empty() && !is_over()) {
      const NodePtr node = std::move(waiting.back());
      waiting.pop_back();
      if (!node || !seen_.insert(node.get()).second) continue;
      visit(node);
      for (const auto& edge : node->next_edges()) {
        if (edge.function && !seen_.contains(edge.function.get())) waiting.push_back(edge.function);
      }
    }
  }

 private:
  bool is_over() {
    if (ends_at_ != 0 && ++looks_ % 64 == 0) is_cut_ = is_cut_ || thread_cpu_ns() > ends_at_;
    return is_cut_;
  }

  void visit(const NodePtr& node) {
    if (auto* leaf = dynamic_cast<autograd::AccumulateGrad*>(node.get())) {
      write_tensor(EventKind::parameter, *node, leaf->variable);
      if (leaf->variable.grad().defined()) write_tensor(EventKind::gradient, *node, leaf->variable.grad());
      return;
    }
    if (visitor_unpacks<autograd::SavedVariable> && hooks_were_seen.load(std::memory_order_relaxed)) {
      write_packed(*node, 1);  // or nothing at all: it cannot be asked
      return;
    }
    compiled::AutogradCompilerCall call(compiled::SizeInput::STATIC);
    compiled::NodeCall node_call(0, node);
    compiled::CompiledNodeArgs arguments(call, node_call);
    bool known = true;
    try {
      if (is_python_node(*node)) {
        known = collect_from_python(node, arguments);
      } else {
        node->compiled_args(arguments);
      }
    } catch (...) {  // released already, modified in place, or no such method: nothing to say about this node
    }
    for (const at::Tensor& tensor : call.tensor_args.inputs) write_tensor(EventKind::saved_tensor, *node, tensor);
    const auto packed = call.hooks.size();
    if (packed != 0 || !known) write_packed(*node, packed);
  }

  /// False if what the node saved cannot be determined.
  bool collect_from_python(const NodePtr& node, compiled::CompiledNodeArgs& arguments) {
    if (!gil_.held()) return false;
    const SavedByPythonNode saved(*python_api(), node);
    for (const autograd::SavedVariable* variable : saved.variables()) arguments.collect(*variable, true);
    return saved.known();
  }

  Event node_event(EventKind kind, const autograd::Node& node) {
    Context context;
    context.node = state_.names.name(std::string_view(node.name()));
    Event event = state_.event(kind);
    event.context = state_.names.context(context);
    event.call_id = 0;
    event.node_sequence = node.sequence_nr();
    event.node_thread = ThreadNumbers::of_node(node.thread_id());
    return event;
  }

  void write_tensor(EventKind kind, const autograd::Node& node, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    Event event = node_event(kind, node);
    if (!locate_storage(*tensor.unsafeGetTensorImpl(), event)) return;
    event.detail = state_.names.name(describe_shape(tensor.sizes(), tensor.scalar_type()));
    session().writer().write(event);
  }

  void write_packed(const autograd::Node& node, size_t count) {
    Event event = node_event(EventKind::packed_tensor, node);
    event.detail = count;
    session().writer().write(event);
  }

  ThreadState& state_;
  at::DisableRecordFunctionGuard no_ops_;
  // A saved output is detached to be looked at: no op that a dispatch mode of the user's, or functorch, should see.
  c10::impl::ExcludeDispatchKeyGuard no_modes_{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
  GilScope gil_;
  std::unordered_set<const void*> seen_;
  int64_t ends_at_ = 0;  ///< 0: where the graph does
  uint32_t looks_ = 0;
  bool is_cut_ = false;
};

/// The CPU time of all walks at OOMs, of which each takes at most half of what is left: a program may live on OOMs, and its
/// graph have any number of nodes (3 µs each).
class TimeOfOomWalks {
 public:
  static int64_t share() { return std::max(kLeastNs, left_.load(std::memory_order_relaxed) / 2); }
  static void take(int64_t cpu_ns) { left_.fetch_sub(cpu_ns, std::memory_order_relaxed); }

 private:
  static constexpr int64_t kAllNs = 1'200'000'000, kLeastNs = 15'000'000;
  static inline std::atomic<int64_t> left_ = kAllNs;
};

// A pointer that the engine keeps alive, as an owning one.
NodePtr owned(void* raw) { return static_cast<autograd::Node*>(raw)->getptr(); }

/// The node, or null for the one that the engine drops once it has run (see RunningTasks).
void* lives_on(void* node) {
  return typeid(*static_cast<autograd::Node*>(node)) == typeid(autograd::GraphRoot) ? nullptr : node;
}

/// All nodes of the graph task that runs on this thread but its first one, the newest first. The engine keeps them alive.
std::vector<autograd::Node*> nodes_of_running_task() {
  const auto* set = autograd::get_current_graph_task_nodes_in_graph();
  if (set == nullptr) return {};
  std::vector<autograd::Node*> nodes(set->begin(), set->end());
  std::ranges::stable_sort(nodes, std::greater{}, [](const autograd::Node* node) { return node->sequence_nr(); });
  return nodes;
}

/// True for the first thread that comes to the task.
bool claim_task(int task) {
  std::atomic<int>& last = session().last_task;
  int newest = last.load(std::memory_order_relaxed);
  while (newest < task && !last.compare_exchange_weak(newest, task)) {
  }
  return newest < task;
}

// True if the backward pass that begins is to be walked, which is noted. Steps repeat: only one that begins with more bytes alive
// than any before it can set the peak.
bool claim_walk() {
  Session& recording = session();
  const int64_t live = recording.live_bytes();
  const bool higher = live > recording.highest_walked.load(std::memory_order_relaxed);
  if (higher) recording.highest_walked.store(live, std::memory_order_relaxed);
  // Of a long run the old walks are overwritten, and a report on what is left wants one.
  const bool fades = recording.fades(recording.walked_at);
  if (higher || fades) recording.walked_at.store(recording.writer().times_overwritten(), std::memory_order_relaxed);
  return higher || fades || recording.walks.load(std::memory_order_relaxed) < 2;
}

// The gradient that the running node makes: as large as one of the tensors that its next nodes expect.
void write_requested_gradient(ThreadState& state) {
  const auto node = autograd::get_current_node();
  if (!node) return;
  for (const auto& edge : node->next_edges()) {
    if (!edge.function || edge.input_nr >= edge.function->num_inputs()) continue;
    const auto& metadata = edge.function->input_metadata(edge.input_nr);
    if (metadata.is_nested_tensor()) continue;
    const at::IntArrayRef sizes = c10::asIntArrayRefUnchecked(metadata.shape_as_dim_vector());
    const auto type = c10::typeMetaToScalarType(metadata.dtype());
    Event event = state.event(EventKind::requested_gradient);
    event.bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(type));
    event.detail = state.names.name(describe_shape(sizes, type));
    event.node_sequence = edge.function->sequence_nr();
    event.node_thread = ThreadNumbers::of_node(edge.function->thread_id());
    session().writer().write(event);
  }
}

}  // namespace

void enter_graph_task(ThreadState& state, size_t level, int task, void* node) {
  if (!state.tasks.begin_node(level, task, lives_on(node))) return;
  Session& recording = session();
  if (!claim_task(task)) return;              // another thread works on it already
  watch_outputs(recording.near_the_limit());  // from the second step on only where they are needed
  if (!uses_several_devices() && !claim_walk()) return;
  recording.walks.fetch_add(1, std::memory_order_relaxed);
  Walk walk(state);
  walk.begin(static_cast<uint64_t>(task));
  walk.from(owned(node));
}

void join_graph_task(ThreadState& state, size_t level, int task, void* node) {
  if (state.tasks.begin_node(level, task, lives_on(node))) claim_task(task);
}

namespace {

GraphMark mark_of_graph(size_t newest) {
  return {.walk = walks_begun.load(std::memory_order_relaxed),
          .next_node = at::sequence_number::peek(),
          .task = session().last_task.load(std::memory_order_relaxed),
          .newest = newest};
}

constexpr size_t kLargeGraph = 4096;  ///< nodes

// The program caught an OOM of a large graph and tries again: the walk before tells what this one would.
bool is_described(const ThreadState& state, size_t newest) {
  const DescribedGraph& known = state.described_graph;
  return known.mark.walk != 0 && !state.place.in_node() && known.mark == mark_of_graph(newest) &&
         !session().fades(known.written_at);
}

void note_cut() {
  static std::atomic<bool> is_noted = false;
  if (is_noted.exchange(true)) return;
  write_note("not read in full",
             "the autograd graph at an OOM, which is too large: some of what it keeps is among the outputs");
}

}  // namespace

void describe_graph_at_oom(ThreadState& state) {
  if (state.place.in_node()) write_requested_gradient(state);
  if (state.place.in_node() && uses_several_devices()) return;  // walked when the task began
  const std::vector<NodePtr> newest = state.newest_nodes.living();
  if (is_described(state, newest.size())) return write_graph_begin(state, kNoTask, kGraphUnchanged);
  const int64_t begins = thread_cpu_ns();
  Walk walk(state);
  walk.limit(TimeOfOomWalks::share());
  walk.begin(kNoTask);
  if (state.place.in_node()) {
    for (const RunningTask& task : state.tasks.running(state.place.running_nodes())) {
      if (task.root != nullptr) walk.from(owned(task.root));
    }
    for (autograd::Node* node : nodes_of_running_task())
      walk.from(owned(node));  // where the root is not its first node
  }
  for (const NodePtr& node : newest) walk.from(node);
  TimeOfOomWalks::take(thread_cpu_ns() - begins);
  if (walk.is_cut()) note_cut();
  state.described_graph.mark = walk.nodes() > kLargeGraph ? mark_of_graph(newest.size()) : GraphMark{};
  state.described_graph.written_at = session().writer().times_overwritten();
}

void walk_graph_of(ThreadState& state, const at::Tensor& output) {
  Walk walk(state);
  walk.begin(kNoTask);
  walk.from(output.grad_fn());
}

void note_accumulated_gradient(ThreadState& state, const Context& context) {
  const auto node = autograd::get_current_node();
  if (!node || typeid(*node) != typeid(autograd::AccumulateGrad)) return;
  const auto& leaf = static_cast<const autograd::AccumulateGrad&>(*node);
  if (!leaf.variable.defined()) return;
  const at::Tensor& gradient = leaf.variable.grad();
  Event event = state.event(EventKind::gradient);
  if (!gradient.defined() || !locate_storage(*gradient.unsafeGetTensorImpl(), event)) return;
  event.context = state.names.context(context);
  event.node_sequence = node->sequence_nr();
  event.node_thread = ThreadNumbers::of_node(node->thread_id());
  learn(state, event);
  session().writer().write(event);
}

}  // namespace oomdiag
