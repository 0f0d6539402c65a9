#include "profiler/replay/graphs.h"

#include <algorithm>
#include <iterator>

#include "profiler/replay/join.h"

namespace oomdiag {
namespace {

AllocationSignature signature_of(const Row& row) {
  return {.device = row.device,
          .context = row.maker.context,
          .bytes = row.maker.bytes,
          .nth_in_op = row.nth_in_op,
          .nth_at_place = row.nth_at_place};
}

}  // namespace

uint32_t PlaceCounter::next(const Event& alloc) {
  if (!in_node(alloc)) {
    forward_runs_ = true;
  } else if (forward_runs_) {
    forward_runs_ = false;
    ++pass_;
  }
  Count& count = counts_[std::min<size_t>(alloc.context, counts_.size() - 1)];
  if (count.pass != pass_) count = {.pass = pass_};
  return count.allocations++;
}

bool AllocationSignature::is_of_same_place(const AllocationSignature& other) const {
  AllocationSignature same = other;
  same.nth_at_place = nth_at_place;
  return *this == same;
}

void SavedAllocations::add(const Row& row, const Saver& saver) {
  if (!row.is_known() || row.maker.op_serial == 0) return;
  Saved& saved = saved_[signature_of(row)];
  if (row.born < saved.born) return;
  if (row.born > saved.born) saved = {.born = row.born};
  saved.savers.push_back(saver);
}

const std::vector<Saver>& SavedAllocations::find(const Row& row) const {
  static const std::vector<Saver> kNobody;
  if (row.maker.op_serial == 0) return kNobody;
  const AllocationSignature signature = signature_of(row);
  const auto next = saved_.upper_bound(signature);
  if (next == saved_.begin()) return kNobody;
  const auto& [found, saved] = *std::prev(next);
  if (found == signature) return saved.savers;
  const bool is_last = next == saved_.end() || !next->first.is_of_same_place(signature);
  return is_last && found.is_of_same_place(signature) ? saved.savers : kNobody;
}

void Graphs::begin_walk(uint64_t index, bool at_refusal) {
  if (!open_ || at_refusal) ++walk_;
  if (open_) return;
  open_ = true;
  ++graph_;
  began_ = index;
  saved_ = std::make_shared<SavedAllocations>();
}

void Graphs::save(const Event& event, Row& row) {
  const Saver saver{.node_sequence = event.node_sequence,
                    .context = event.context,
                    .shape = static_cast<uint32_t>(event.detail),
                    .graph = graph_,
                    .walk = walk_,
                    .node_thread = event.node_thread};
  row.ever_saved = true;
  if (!row.savers.empty() && row.savers.front().graph != graph_) row.savers.clear();
  row.savers.push_back(saver);
  saved_->add(row, saver);
}

}  // namespace oomdiag
