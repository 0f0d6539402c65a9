#include "profiler/replay/evidence/graphs.h"

#include <algorithm>
#include <iterator>

#include "profiler/replay/evidence/join.h"

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
  saved_.push_back({.signature = signature_of(row), .born = row.born, .saver = saver});
}

void SavedAllocations::finish() {
  std::stable_sort(saved_.begin(), saved_.end(), [](const Saved& a, const Saved& b) {
    return a.signature != b.signature ? a.signature < b.signature : a.born > b.born;
  });
}

std::vector<Saver> SavedAllocations::find(const Row& row) const {
  if (row.maker.op_serial == 0) return {};
  const AllocationSignature signature = signature_of(row);
  const auto next = std::upper_bound(saved_.begin(), saved_.end(), signature,
                                     [](const auto& wanted, const Saved& one) { return wanted < one.signature; });
  if (next == saved_.begin()) return {};
  const AllocationSignature& found = std::prev(next)->signature;
  const bool is_last = next == saved_.end() || !next->signature.is_of_same_place(signature);
  if (found != signature && !(is_last && found.is_of_same_place(signature))) return {};
  auto one = std::lower_bound(saved_.begin(), next, found,
                              [](const Saved& saved, const auto& wanted) { return saved.signature < wanted; });
  std::vector<Saver> savers;
  for (const uint64_t youngest = one->born; one != next && one->born == youngest; ++one) savers.push_back(one->saver);
  return savers;
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
