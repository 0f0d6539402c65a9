#include "profiler/replay/allocations/step_allocations.h"

#include <algorithm>
#include <utility>

namespace oomdiag {
namespace {

/// Turns indices of events into positions in the step: the n-th of its allocations and frees, from 1.
class EventPositions {
 public:
  EventPositions(const BlockTable& table, const StepSlice& slice) : begin_(slice.begins()), end_(slice.horizon().end) {
    for (const uint32_t id : slice.rows()) {
      if (was_born(table[id])) indices_.push_back(table[id].born);
      if (has_died(table[id])) indices_.push_back(table[id].died);
    }
    std::sort(indices_.begin(), indices_.end());
  }
  bool was_born(const Row& row) const { return row.is_known() && !row.is_initial() && row.born >= begin_; }
  bool has_died(const Row& row) const { return row.died < end_; }
  uint32_t born(const Row& row) const { return was_born(row) ? position_of(row.born) : BlockLife::kBefore; }
  uint32_t died(const Row& row) const { return has_died(row) ? position_of(row.died) : BlockLife::kNever; }
  uint32_t last() const { return static_cast<uint32_t>(indices_.size()); }
  std::vector<uint64_t> finish() { return std::move(indices_); }

 private:
  uint32_t position_of(uint64_t index) const {
    return static_cast<uint32_t>(1 + (std::lower_bound(indices_.begin(), indices_.end(), index) - indices_.begin()));
  }

  uint64_t begin_, end_;
  std::vector<uint64_t> indices_;
};

// What was refused, as if it had been granted.
BlockLife wanted_block(const OutOfMemory& refusal, uint32_t position) {
  BlockLife life{.bytes = refusal.requested_bytes, .born = position, .phase = refusal.phase};
  life.made = refusal.where;
  if (life.phase == Phase::forward) life.category = Category::output;
  if (life.phase == Phase::backward) life.category = Category::gradient_in_flight;
  if (life.phase == Phase::optimizer) {
    life.category = makes_state(refusal.where.op) ? Category::optimizer_state : Category::temporary;
  }
  const std::string_view op = refusal.where.inner;
  const bool may_want = is_gemm(op) ? is_cublas_workspace(refusal.requested_bytes, 0) : takes_workspace(op);
  const bool scratch = may_want && !refusal.first_in_op;
  if (scratch && refusal.wanted_shape.empty()) life.category = Category::workspace;
  return life;
}

}  // namespace

// Step 1 makes gradients and optimizer state only as it goes: a later step that comes as near to the peak as makes no
// difference tells more.
uint32_t typical_step(const DeviceHistory& device) {
  if (device.failure) return device.failure->step;
  if (device.peak.step != 1) return device.peak.step;
  for (const PhasePeak& peak : device.phases) {
    if (peak.step > 1 && peak.allocated_bytes >= device.peak.allocated_bytes / 1000 * 999) return peak.step;
  }
  return 1;
}

uint32_t complete_step(const Trace& trace, const Outline& outline, const DeviceHistory& device) {
  if (!device.failure || device.failure->step < 2) return 0;
  const uint32_t step = device.failure->step - 1;
  const bool cut_off = trace.overwritten_events > 0 && step <= outline.first_step;  // its beginning is gone
  return cut_off ? 0 : step;
}

StepLives read_step(const Trace& trace, const NodeTable& nodes, const Views& views, const StepSlice& slice,
                    const OutOfMemory* refusal) {
  if (slice.step() == 0 || slice.begins() == kNoEvent) return {};
  const RowReader reader(trace, nodes, views.table, slice.rows(), slice.horizon());
  EventPositions positions(views.table, slice);
  StepLives step{.step = slice.step()};
  for (const uint32_t id : slice.rows()) {
    const Row& row = views.table[id];
    if (row.bytes == 0) continue;
    std::vector<Saver> savers = slice.savers_of(row);
    const uint32_t shape = row.shape != 0 || savers.empty() ? row.shape : savers.front().shape;
    const bool died = positions.has_died(row);
    step.blocks.push_back({.bytes = row.bytes,
                           .born = positions.born(row),
                           .died = positions.died(row),
                           .category = reader.category_of(row, !savers.empty()),
                           .phase = row.phase,
                           .in_graph = reader.is_in_graph(row),
                           .freed_in_backward = died && row.freed_in_node,
                           .freed_by_accumulate = died && row.freed_by_accumulate,
                           .ever_saved = row.ever_saved || !savers.empty(),
                           .made = reader.made_of(row),
                           .shape = trace.name(shape),
                           .saved_by = reader.locate_savers(std::move(savers))});
  }
  if (refusal != nullptr) step.blocks.push_back(wanted_block(*refusal, positions.last() + 1));
  std::stable_sort(step.blocks.begin(), step.blocks.end(),
                   [](const BlockLife& a, const BlockLife& b) { return a.born < b.born; });
  step.events = positions.finish();
  return step;
}

}  // namespace oomdiag
