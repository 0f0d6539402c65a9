#include "profiler/replay/allocations/live_set.h"

#include <algorithm>

namespace oomdiag {

void LiveSetSavingNodes::begin(const LiveSet& live_set, Phase phase, bool own_traversal, const Graphs& graphs) {
  done_ = live_set.allocations.empty();
  own_traversal_ = own_traversal;
  may_infer_ = phase == Phase::forward || phase == Phase::backward;
  alike_ = graphs.newest();
  alike_began_ = graphs.began();
  const bool behind = phase == Phase::backward || phase == Phase::optimizer;  // no traversal to come is of this graph
  waits_ = own_traversal || !behind;
  if (!own_traversal && phase == Phase::backward && graphs.traversed()) traversal_ = graphs.traversal();
}

void LiveSetSavingNodes::note_traversal(const Graphs& graphs) {
  if (!waits_) return;
  waits_ = false;
  traversal_ = graphs.traversal();
}

void LiveSetSavingNodes::conclude(const AllocationTable& table, LiveSet& live_set) {
  if (done_ || traversal_ == 0) return;
  done_ = true;
  for (size_t b = 0; b < live_set.allocations.size(); ++b) {
    for (const SavingNode& saving_node : table[live_set.allocations[b]].saving_nodes) {
      if (saving_node.traversal == traversal_) live_set.saving_nodes[b].push_back(saving_node);
    }
  }
}

void LiveSetSavingNodes::finish(const AllocationTable& table, LiveSet& live_set) {
  conclude(table, live_set);
  if (!done_ && may_infer_) infer(table, live_set);
  done_ = true;
}

void LiveSetSavingNodes::infer(const AllocationTable& table, LiveSet& live_set) const {
  for (size_t b = 0; b < live_set.allocations.size(); ++b) {
    const Allocation& allocation = table[live_set.allocations[b]];
    if (!allocation.is_known() || allocation.is_initial() || allocation.born < alike_began_) continue;
    live_set.saving_nodes[b] = alike_->find(allocation);
    live_set.saved_by_likeness = live_set.saved_by_likeness || !live_set.saving_nodes[b].empty();
  }
}

void StepCollector::begin(uint64_t index, const std::vector<uint32_t>& living, AllocationTable& table,
                          const Graphs& graphs) {
  is_open_ = true;
  begins_ = index;
  traversals_before_ = graphs.traversal();
  alike_ = graphs.newest();
  allocations_ = living;
  for (const uint32_t allocation : allocations_) table.hold(allocation);
}

void StepCollector::add(uint32_t allocation, uint64_t index, int64_t allocated_bytes, AllocationTable& table) {
  allocations_.push_back(allocation);
  table.hold(allocation);
  if (in_window_ == 0) {
    highs_.push_back({index, allocated_bytes});
  } else if (allocated_bytes > highs_.back().bytes) {
    highs_.back() = {index, allocated_bytes};
  }
  in_window_ = in_window_ + 1 == window_ ? 0 : in_window_ + 1;
  if (allocations_.size() >= limit_) thin(table);
}

void StepCollector::end(const ObservationWindow& observed, AllocationTable& table) {
  is_open_ = false;
  if (allocations_.size() > kMaxAllocations) thin(table);
  observed_ = observed;
}

std::vector<SavingNode> StepCollector::saving_nodes_of(const Allocation& allocation) const {
  std::vector<SavingNode> saving_nodes;
  for (const SavingNode& saving_node : allocation.saving_nodes) {
    if (saving_node.traversal > traversals_before_) saving_nodes.push_back(saving_node);
  }
  const bool unseen = !traversed_ && allocation.is_known() && !allocation.is_initial() && allocation.born >= begins_;
  return saving_nodes.empty() && unseen ? alike_->find(allocation) : saving_nodes;
}

void StepCollector::thin(AllocationTable& table) {
  const auto let_go = [&](uint32_t id) {
    const bool goes = !table[id].alive() && !lives_at_high_point(table[id]);
    if (goes) table.let_go(id);
    return goes;
  };
  for (std::erase_if(allocations_, let_go); allocations_.size() > kMaxAllocations / 2 && highs_.size() > 64;
       std::erase_if(allocations_, let_go)) {
    join_windows();
  }
  limit_ = std::max(kMaxAllocations, 2 * allocations_.size());
}

void StepCollector::join_windows() {
  const bool half_full = highs_.size() % 2 == 1;
  for (size_t i = 0; 2 * i < highs_.size(); ++i) {
    const High& first = highs_[2 * i];
    const bool second = 2 * i + 1 < highs_.size() && highs_[2 * i + 1].bytes > first.bytes;
    highs_[i] = second ? highs_[2 * i + 1] : first;
  }
  highs_.resize((highs_.size() + 1) / 2);
  const uint64_t in_last = in_window_ == 0 ? window_ : in_window_;
  in_window_ = (half_full ? 0 : window_) + in_last;
  window_ *= 2;
  if (in_window_ == window_) in_window_ = 0;
}

bool StepCollector::lives_at_high_point(const Allocation& allocation) const {
  const auto at = std::lower_bound(highs_.begin(), highs_.end(), allocation.born,
                                   [](const High& high, uint64_t index) { return high.index < index; });
  return at != highs_.end() && at->index < allocation.died;
}

}  // namespace oomdiag
