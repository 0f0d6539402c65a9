#include "profiler/replay/evidence/allocation_reader.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/evidence/categories.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/evidence/stack_rules.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

bool has_workspace_size(const Allocation& allocation, const Trace& trace) {
  return is_cublas_workspace(allocation.maker.bytes, allocation.device < trace.devices.size()
                                                         ? trace.devices[allocation.device].cublas_workspace_bytes
                                                         : 0);
}

}  // namespace

AllocationReader::AllocationReader(const Trace& trace, const NodeTable& nodes, const AllocationTable& table,
                                   std::span<const uint32_t> allocations, const ObservationWindow& observed)
    : trace_(trace), nodes_(nodes), observed_(observed) {
  const auto is_parameter = [&](uint32_t id) { return table[id].parameter; };
  modules_known_ = trace.process.python && std::any_of(allocations.begin(), allocations.end(), is_parameter);
  const auto calls_module = [](uint32_t marks) { return (marks & kCallsModule) != 0; };
  stacks_call_modules_ = std::ranges::any_of(trace.stack_marks, calls_module);
  reduces_gradients_ = std::ranges::any_of(
      trace.names, [](const std::string& name) { return name.starts_with("torch.distributed.ddp.reducer::"); });
  workspaces_ = find_kept_workspaces(table, allocations);
}

Category AllocationReader::category_of(const Allocation& allocation, bool saved) const {
  return trace_.process.snapshot ? judge_by_stacks(allocation).category : categorise(gather(allocation, saved));
}

StackVerdict AllocationReader::judge_by_stacks(const Allocation& allocation) const {
  if (!trace_.process.snapshot) return {};
  const uint32_t marks = marks_of(allocation);
  return categorise_by_stacks(marks, fate_of(allocation, marks));
}

uint32_t AllocationReader::marks_of(const Allocation& allocation) const {
  const Context& context = trace_.context(allocation.maker.context);
  const std::string_view op = trace_.name(context.op);
  const uint32_t recorded = trace_.marks_of(allocation.maker.context);
  uint32_t marks = recorded;
  const auto mark = [&](uint32_t one, bool holds) { marks |= holds ? one : 0; };
  mark(kInBackward | kFramesKnown, context.node != 0);
  mark(kModulesKnown, stacks_call_modules_);
  mark(kFrameless, context.node != 0 && recorded == 0);
  mark(kBeforeForward, allocation.phase == Phase::setup || allocation.phase == Phase::other);
  mark(kBringsData, op.empty() || brings_data(op));
  mark(kMayBeWorkspace, !allocation.first_in_op() && (takes_workspace(op) || (marks & kConvolves) != 0));
  mark(kKeptWorkspace, workspaces_.contains(&allocation));
  mark(kSavedBefore, allocation.saved_before);
  mark(kStateUnfinished, allocation.alive() && allocation.end_step <= allocation.step);
  return marks;
}

uint8_t AllocationReader::fate_of(const Allocation& allocation, uint32_t marks) const {
  const bool outlives = allocation.end_step > allocation.step;
  if (allocation.died >= observed_.unwound || allocation.alive()) return outlives ? kOutlivesStep : kLivesOn;
  if (allocation.died_in_op) return kDiedInCall;
  const uint32_t freed_by = trace_.marks_of(allocation.freed_at);
  if ((freed_by & kClearsGradients) != 0) return kDiedWithGradients;
  if ((freed_by & kStepsOptimizer) != 0 && !outlives) {
    return (marks & kStepsOptimizer) != 0 ? kDiedInOptimizer : kDiedWithGradients;
  }
  if (allocation.freed_in_node) return kDiedInBackward;
  return outlives ? kOutlivesStep : kDiedElsewhere;
}

std::vector<Where> AllocationReader::locate_saving_nodes(std::vector<SavingNode> saving_nodes) const {
  // A node may keep one storage several times (x ∙ x), and an OOM in backward is described by two traversals. Forward numbers
  // the nodes upwards.
  const auto node_of = [](const SavingNode& saving_node) {
    return std::tuple(saving_node.node_sequence, saving_node.node_thread);
  };
  std::stable_sort(saving_nodes.begin(), saving_nodes.end(),
                   [&](const auto& a, const auto& b) { return node_of(a) < node_of(b); });
  const auto same = [&](const auto& a, const auto& b) { return node_of(a) == node_of(b); };
  saving_nodes.erase(std::unique(saving_nodes.begin(), saving_nodes.end(), same), saving_nodes.end());
  std::vector<Where> places;
  for (const SavingNode& saving_node : saving_nodes) {
    places.push_back(locate(trace_, nodes_,
                            {.node_sequence = saving_node.node_sequence,
                             .context = saving_node.context,
                             .node_thread = saving_node.node_thread}));
  }
  return places;
}

// Made with the model around the module, and again in its second forward pass, once the order of the gradients is known.
bool AllocationReader::is_bucket(const Context& context, int64_t bytes) const {
  constexpr int64_t kSmallest = 1 << 20;  // the first one that DistributedDataParallel makes; others hold more
  const std::string_view module = trace_.name(context.module);
  return bytes >= kSmallest && trace_.name(context.op) == "aten::empty" &&
         (module.empty() || module == "DistributedDataParallel");
}

AllocationEvidence AllocationReader::gather(const Allocation& allocation, bool saved) const {
  const Context& context = trace_.context(allocation.maker.context);
  const bool dead = allocation.died < observed_.end;
  const bool optimizer_is_open = observed_.optimizer_open_since != kNoEvent && !allocation.is_initial() &&
                                 allocation.born > observed_.optimizer_open_since;
  // Also where the graph was not traversed: what a recorded op made and a node of backward frees was saved for it.
  const bool freed_by_backward =
      allocation.freed_in_node && allocation.died < observed_.unwound && is_in_graph(allocation);
  return {.parameter = allocation.parameter,
          .buffer = allocation.buffer,
          .gradient = allocation.gradient_since < observed_.named_end,
          .state = allocation.state,
          .bucket = reduces_gradients_ && is_bucket(context, allocation.maker.bytes),
          .saved = saved || freed_by_backward,
          .ever_saved = allocation.ever_saved,
          .phase = allocation.phase,
          .in_node = in_node(allocation.maker) || context.node != 0,
          .recomputed = (context.flags & kRecomputation) != 0,
          .in_optimizer = is_optimizer_step(trace_.name(context.scope)),
          .optimizer_is_open = dead ? allocation.died_in_optimizer : optimizer_is_open,
          .in_module = context.module != 0,
          .op_made_nodes = op_made_nodes(allocation),
          .grad_mode = (context.flags & kGradMode) != 0,
          .first_in_op = allocation.first_in_op(),
          .dies_in_op = dies_in_op(allocation),
          .kept_workspace = workspaces_.contains(&allocation),
          .modules_known = modules_known_,
          .op = trace_.name(context.op),
          .inner = trace_.name(context.inner)};
}

// Of a block older than the trace it is not known whether its op made nodes: grad mode is the best guess.
bool AllocationReader::op_made_nodes(const Allocation& allocation) const {
  return allocation.op_made_nodes ||
         (allocation.is_initial() && (trace_.context(allocation.maker.context).flags & kGradMode) != 0);
}

// At a peak the op goes on, and what it frees itself was only for itself. In an op that failed nothing was freed in time.
bool AllocationReader::dies_in_op(const Allocation& allocation) const {
  const bool in_failed_op = observed_.failed_op != 0 && allocation.maker.call_id == observed_.failed_op;
  return (allocation.died_in_op && allocation.died < observed_.unwound) || (in_failed_op && !allocation.first_in_op());
}

// The blocks that cuBLAS keeps as workspace. A handle has one per stream, and a thread one handle: only the oldest block of
// that size counts, and never the first of its op, which is the op's result.
std::set<const Allocation*> AllocationReader::find_kept_workspaces(const AllocationTable& table,
                                                                   std::span<const uint32_t> allocations) const {
  std::map<std::tuple<uint16_t, uint64_t, int64_t>, const Allocation*> oldest;
  for (const uint32_t id : allocations) {
    const Allocation& allocation = table[id];
    const bool result = allocation.first_in_op() && !allocation.is_initial();
    if (result || !has_workspace_size(allocation, trace_) || dies_in_op(allocation)) continue;
    if (!is_gemm(trace_.name(trace_.context(allocation.maker.context).inner))) continue;
    const Allocation*& found = oldest[{allocation.maker.thread, allocation.maker.detail, allocation.maker.bytes}];
    if (found == nullptr || allocation.maker.sequence < found->maker.sequence) found = &allocation;
  }
  std::set<const Allocation*> kept;
  for (const auto& [key, allocation] : oldest) kept.insert(allocation);
  return kept;
}

}  // namespace oomdiag
