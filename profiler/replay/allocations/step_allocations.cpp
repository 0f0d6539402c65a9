#include "profiler/replay/allocations/step_allocations.h"

#include <algorithm>
#include <span>
#include <utility>

#include "profiler/replay/allocations/allocation_pass.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/followed_device.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/evidence/allocation_reader.h"
#include "profiler/replay/evidence/categories.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

/// Turns indices of events into positions in the step: the n-th of its allocations and frees, from 1.
class EventPositions {
 public:
  EventPositions(const AllocationTable& table, const StepCollector& taken, std::span<const uint32_t> allocations)
      : begin_(taken.begins()), end_(taken.observed().end) {
    for (const uint32_t id : allocations) {
      if (was_born(table[id])) indices_.push_back(table[id].born);
      if (has_died(table[id])) indices_.push_back(table[id].died);
    }
    std::sort(indices_.begin(), indices_.end());
  }
  bool was_born(const Allocation& allocation) const {
    return allocation.is_known() && !allocation.is_initial() && allocation.born >= begin_;
  }
  bool has_died(const Allocation& allocation) const { return allocation.died < end_; }
  uint32_t born(const Allocation& allocation) const {
    return was_born(allocation) ? position_of(allocation.born) : StepAllocation::kBefore;
  }
  uint32_t died(const Allocation& allocation) const {
    return has_died(allocation) ? position_of(allocation.died) : StepAllocation::kNever;
  }
  uint32_t last() const { return static_cast<uint32_t>(indices_.size()); }
  std::vector<uint64_t> finish() { return std::move(indices_); }

 private:
  uint32_t position_of(uint64_t index) const {
    return static_cast<uint32_t>(1 + (std::lower_bound(indices_.begin(), indices_.end(), index) - indices_.begin()));
  }

  uint64_t begin_, end_;
  std::vector<uint64_t> indices_;
};

// The failed request, as if it had been granted.
StepAllocation requested_block(const OutOfMemory& oom, uint32_t position) {
  StepAllocation life{
      .bytes = oom.requested_bytes, .requested_bytes = oom.requested_bytes, .born = position, .phase = oom.phase};
  life.made = oom.where;
  if (life.phase == Phase::forward) life.category = Category::output;
  if (life.phase == Phase::backward) life.category = Category::activation_gradient;
  if (life.phase == Phase::optimizer) {
    life.category = makes_state(oom.where.op) ? Category::optimizer_state : Category::temporary;
  }
  const std::string_view op = oom.where.inner;
  const bool may_want = is_gemm(op) ? is_cublas_workspace(oom.requested_bytes, 0) : takes_workspace(op);
  const bool scratch = may_want && !oom.first_in_op;
  if (scratch && oom.requested_shape.empty()) life.category = Category::workspace;
  return life;
}

}  // namespace

bool has_complete_step(const Trace& trace, const TracePrescan& prescan, const FollowedDevice& device) {
  const uint32_t step = device.complete.step();
  const bool cut_off = trace.overwritten_events > 0 && step <= prescan.first_step;  // its beginning is gone
  return step != 0 && !cut_off;
}

StepAllocations read_step(const Trace& trace, const FollowedTrace& followed, const FollowedDevice& device,
                          const StepCollector& taken, const OutOfMemory* oom) {
  if (taken.step() == 0) return {};
  const std::vector<uint32_t> ids = taken.allocations(static_cast<uint8_t>(device.history.index), followed.table);
  const AllocationReader reader(trace, followed.nodes, followed.table, ids, taken.observed());
  EventPositions positions(followed.table, taken, ids);
  StepAllocations step{.step = taken.step()};
  for (const uint32_t id : ids) {
    const Allocation& allocation = followed.table[id];
    if (allocation.bytes == 0) continue;
    std::vector<SavingNode> saving_nodes = taken.saving_nodes_of(allocation);
    const bool died = positions.has_died(allocation);
    step.blocks.push_back({.bytes = allocation.bytes,
                           .requested_bytes = allocation.maker.bytes,
                           .born = positions.born(allocation),
                           .died = positions.died(allocation),
                           .category = reader.category_of(allocation, !saving_nodes.empty()),
                           .phase = allocation.phase,
                           .in_graph = reader.is_in_graph(allocation),
                           .freed_in_backward = died && allocation.freed_in_node,
                           .freed_by_accumulate = died && allocation.freed_by_accumulate,
                           .ever_saved = allocation.ever_saved || !saving_nodes.empty(),
                           .made = reader.made_of(allocation),
                           .shape = trace.name(allocation.shape_or_saved(saving_nodes)),
                           .saved_by = reader.locate_saving_nodes(std::move(saving_nodes))});
  }
  if (oom != nullptr) step.blocks.push_back(requested_block(*oom, positions.last() + 1));
  std::stable_sort(step.blocks.begin(), step.blocks.end(),
                   [](const StepAllocation& a, const StepAllocation& b) { return a.born < b.born; });
  step.events = positions.finish();
  return step;
}

}  // namespace oomdiag
