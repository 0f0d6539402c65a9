#include "profiler/replay/allocations/live_set.h"

#include <algorithm>

#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/evidence/allocation_reader.h"
#include "profiler/replay/evidence/graphs.h"
#include "profiler/replay/history.h"

namespace oomdiag {

void LiveSetSavingNodes::begin(Phase phase, bool own_traversal, const Graphs& graphs) {
  own_traversal_ = own_traversal;
  may_infer_ = phase == Phase::forward || phase == Phase::backward;
  if (alike_ != graphs.newest()) alike_ = graphs.newest();
  alike_began_ = graphs.began();
  const bool behind = phase == Phase::backward || phase == Phase::optimizer;  // no traversal to come is of this graph
  waits_ = own_traversal || !behind;
  traversal_ = !own_traversal && phase == Phase::backward && graphs.traversed() ? graphs.traversal() : 0;
  kept_.clear();
}

void LiveSetSavingNodes::note_traversal(const Graphs& graphs) {
  if (!waits_) return;
  waits_ = false;
  traversal_ = graphs.traversal();
}

void LiveSetSavingNodes::keep(uint32_t id, const Allocation& allocation) {
  auto nodes = find(id, allocation);
  if (!nodes.empty()) kept_[id] = std::move(nodes);
}

std::vector<SavingNode> LiveSetSavingNodes::find(uint32_t id, const Allocation& allocation) const {
  if (const auto kept = kept_.find(id); kept != kept_.end()) return kept->second;
  std::vector<SavingNode> nodes;
  for (const SavingNode& saving_node : allocation.saving_nodes) {
    if (traversal_ != 0 && saving_node.traversal == traversal_) nodes.push_back(saving_node);
  }
  return nodes;
}

void LiveSetSavingNodes::finish(const AllocationTable& table, LiveSet& live_set) const {
  live_set.walked_at_failure = own_traversal_ && traversal_ != 0;
  for (const uint32_t id : live_set.allocations) {
    const Allocation& allocation = table[id];
    std::vector<SavingNode>& nodes = live_set.saving_nodes.emplace_back();
    if (traversal_ != 0) {
      nodes = find(id, allocation);
    } else if (may_infer_ && allocation.is_known() && !allocation.is_initial() && allocation.born >= alike_began_) {
      nodes = alike_->find(allocation);
      live_set.saved_from_earlier_step = live_set.saved_from_earlier_step || !nodes.empty();
    }
  }
}

void StepCollector::begin(uint32_t step, uint64_t index, size_t living, const AllocationTable& table,
                          const Graphs& graphs) {
  step_ = step;
  is_open_ = true;
  begins_ = index;
  traversals_before_ = graphs.traversal();
  alike_ = graphs.newest();
  first_number_ = table.next_number();
  end_number_ = ~uint32_t{0};
  count_ = living;
}

void StepCollector::add_high(uint64_t index, int64_t allocated_bytes, AllocationTable& table) {
  ++count_;
  if (in_window_ == 0) {
    highs_.push_back({index, allocated_bytes});
    sure_ = gone_.size();
  } else if (allocated_bytes > highs_.back().bytes) {
    highs_.back() = {index, allocated_bytes};
    let_go_of_lower_point(table);
  }
  in_window_ = in_window_ + 1 == window_ ? 0 : in_window_ + 1;
  if (count_ >= limit_) thin(table);
}

/// The newest window has a higher point than the one at which these lived.
void StepCollector::let_go_of_lower_point(AllocationTable& table) {
  const uint64_t before = highs_.size() > 1 ? highs_[highs_.size() - 2].index : begins_;
  const auto stays = [&](const Gone& gone) { return gone.died == kNoEvent || gone.born <= before; };
  const auto first = gone_.begin() + static_cast<std::ptrdiff_t>(sure_);
  const auto low = std::partition(first, gone_.end(), stays);
  for (auto gone = low; gone != gone_.end(); ++gone) table.let_go(gone->id);
  count_ -= std::min(count_, static_cast<size_t>(gone_.end() - low));
  gone_.erase(low, gone_.end());
  sure_ = gone_.size();
}

void StepCollector::end(const ObservationWindow& observed, AllocationTable& table) {
  if (!is_open_) return;
  is_open_ = false;
  end_number_ = table.next_number();
  if (window_ > 1 || count_ > kMaxAllocations) thin(table);
  observed_ = observed;
}

void StepCollector::drop(AllocationTable& table) {
  for (const Gone& gone : gone_) table.let_go(gone.id);
  gone_.clear();  // its room is used again, as that of the highs
  highs_.clear();
  step_ = end_number_ = 0;
  is_open_ = traversed_ = false;
  begins_ = kNoEvent;
  window_ = 1;
  in_window_ = sure_ = 0;
  limit_ = kMaxAllocations;
}

// A block of no known size that events first name in the step does not count.
std::vector<uint32_t> StepCollector::allocations(uint8_t device, const AllocationTable& table) const {
  std::vector<uint32_t> ids = table.living(device, end_number_);
  std::erase_if(ids, [&](uint32_t id) { return table[id].bytes == 0 && table[id].number >= first_number_; });
  for (const Gone& gone : gone_) ids.push_back(gone.id);
  std::sort(ids.begin(), ids.end(), [&](uint32_t a, uint32_t b) { return table[a].number < table[b].number; });
  return ids;
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
  std::vector<uint32_t> low;
  const auto drop_low = [&] {
    low.clear();
    std::erase_if(gone_, [&](const Gone& gone) {
      if (gone.died == kNoEvent || lives_at_high_point(gone)) return false;
      low.push_back(gone.id);
      return true;
    });
    table.let_go(low);
    count_ -= std::min(count_, low.size());
  };
  for (drop_low(); count_ > kMaxAllocations / 2 && highs_.size() > 64; drop_low()) join_windows();
  limit_ = std::max(kMaxAllocations, 2 * count_);
  sure_ = gone_.size();
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

bool StepCollector::lives_at_high_point(const Gone& gone) const {
  const auto at = std::lower_bound(highs_.begin(), highs_.end(), gone.born,
                                   [](const High& high, uint64_t index) { return high.index < index; });
  return at != highs_.end() && at->index < gone.died;
}

}  // namespace oomdiag
