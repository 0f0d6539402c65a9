#include "profiler/replay/allocations/live_set.h"

#include <algorithm>

namespace oomdiag {

void CutSavers::begin(const Cut& cut, Phase phase, bool own_walk, const Graphs& graphs) {
  done_ = cut.rows.empty();
  own_walk_ = own_walk;
  may_infer_ = phase == Phase::forward || phase == Phase::backward;
  alike_ = graphs.newest();
  alike_began_ = graphs.began();
  const bool behind = phase == Phase::backward || phase == Phase::optimizer;  // no walk to come is of this graph
  waits_ = own_walk || !behind;
  if (!own_walk && phase == Phase::backward && graphs.walked()) walk_ = graphs.walk();
}

void CutSavers::note_walk(const Graphs& graphs) {
  if (!waits_) return;
  waits_ = false;
  walk_ = graphs.walk();
}

void CutSavers::conclude(const BlockTable& table, Cut& cut) {
  if (done_ || walk_ == 0) return;
  done_ = true;
  for (size_t b = 0; b < cut.rows.size(); ++b) {
    for (const Saver& saver : table[cut.rows[b]].savers) {
      if (saver.walk == walk_) cut.savers[b].push_back(saver);
    }
  }
}

void CutSavers::finish(const BlockTable& table, Cut& cut) {
  conclude(table, cut);
  if (!done_ && may_infer_) infer(table, cut);
  done_ = true;
}

void CutSavers::infer(const BlockTable& table, Cut& cut) const {
  for (size_t b = 0; b < cut.rows.size(); ++b) {
    const Row& row = table[cut.rows[b]];
    if (!row.is_known() || row.is_initial() || row.born < alike_began_) continue;
    cut.savers[b] = alike_->find(row);
    cut.saved_by_likeness = cut.saved_by_likeness || !cut.savers[b].empty();
  }
}

void StepSlice::begin(uint64_t index, const std::vector<uint32_t>& living, BlockTable& table, const Graphs& graphs) {
  is_open_ = true;
  begins_ = index;
  walks_before_ = graphs.walk();
  alike_ = graphs.newest();
  rows_ = living;
  for (const uint32_t row : rows_) table.hold(row);
}

void StepSlice::add(uint32_t row, uint64_t index, int64_t allocated_bytes, BlockTable& table) {
  rows_.push_back(row);
  table.hold(row);
  if (in_window_ == 0) {
    highs_.push_back({index, allocated_bytes});
  } else if (allocated_bytes > highs_.back().bytes) {
    highs_.back() = {index, allocated_bytes};
  }
  in_window_ = in_window_ + 1 == window_ ? 0 : in_window_ + 1;
  if (rows_.size() >= limit_) thin(table);
}

void StepSlice::end(const Horizon& horizon, BlockTable& table) {
  is_open_ = false;
  if (rows_.size() > kMostRows) thin(table);
  horizon_ = horizon;
}

std::vector<Saver> StepSlice::savers_of(const Row& row) const {
  std::vector<Saver> savers;
  for (const Saver& saver : row.savers) {
    if (saver.walk > walks_before_) savers.push_back(saver);
  }
  const bool unseen = !walked_ && row.is_known() && !row.is_initial() && row.born >= begins_;
  return savers.empty() && unseen ? alike_->find(row) : savers;
}

void StepSlice::thin(BlockTable& table) {
  const auto let_go = [&](uint32_t id) {
    const bool goes = !table[id].alive() && !lives_at_high_point(table[id]);
    if (goes) table.let_go(id);
    return goes;
  };
  for (std::erase_if(rows_, let_go); rows_.size() > kMostRows / 2 && highs_.size() > 64; std::erase_if(rows_, let_go)) {
    join_windows();
  }
  limit_ = std::max(kMostRows, 2 * rows_.size());
}

void StepSlice::join_windows() {
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

bool StepSlice::lives_at_high_point(const Row& row) const {
  const auto at = std::lower_bound(highs_.begin(), highs_.end(), row.born,
                                   [](const High& high, uint64_t index) { return high.index < index; });
  return at != highs_.end() && at->index < row.died;
}

}  // namespace oomdiag
