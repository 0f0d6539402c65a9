#include "profiler/replay/evidence/graphs.h"

#include <algorithm>
#include <iterator>

#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/evidence/join.h"

namespace oomdiag {
namespace {

AllocationSignature signature_of(const Allocation& allocation) {
  return {.device = allocation.device,
          .context = allocation.maker.context,
          .bytes = allocation.maker.bytes,
          .nth_in_op = allocation.nth_in_op,
          .nth_at_place = allocation.nth_at_place};
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

void SavedAllocations::add(const Allocation& allocation, const SavingNode& saving_node) {
  if (!allocation.is_known() || allocation.maker.call_id == 0) return;
  saved_.push_back({.signature = signature_of(allocation), .born = allocation.born, .saving_node = saving_node});
}

void SavedAllocations::finish() {
  std::stable_sort(saved_.begin(), saved_.end(), [](const Saved& a, const Saved& b) {
    return a.signature != b.signature ? a.signature < b.signature : a.born > b.born;
  });
}

std::vector<SavingNode> SavedAllocations::find(const Allocation& allocation) const {
  if (allocation.maker.call_id == 0) return {};
  const AllocationSignature signature = signature_of(allocation);
  const auto next = std::upper_bound(saved_.begin(), saved_.end(), signature,
                                     [](const auto& requested, const Saved& one) { return requested < one.signature; });
  if (next == saved_.begin()) return {};
  const AllocationSignature& found = std::prev(next)->signature;
  const bool is_last = next == saved_.end() || !next->signature.is_of_same_place(signature);
  if (found != signature && !(is_last && found.is_of_same_place(signature))) return {};
  auto one = std::lower_bound(saved_.begin(), next, found,
                              [](const Saved& saved, const auto& requested) { return saved.signature < requested; });
  std::vector<SavingNode> saving_nodes;
  for (const uint64_t youngest = one->born; one != next && one->born == youngest; ++one)
    saving_nodes.push_back(one->saving_node);
  return saving_nodes;
}

void Graphs::begin_traversal(uint64_t index, bool at_oom) {
  if (!open_ || at_oom) ++traversal_;
  if (open_) return;
  open_ = true;
  ++graph_;
  began_ = index;
  saved_ = std::make_shared<SavedAllocations>();
}

void Graphs::save(const Event& event, Allocation& allocation) {
  const SavingNode saving_node{.node_sequence = event.node_sequence,
                               .context = event.context,
                               .shape = static_cast<uint32_t>(event.detail),
                               .graph = graph_,
                               .traversal = traversal_,
                               .node_thread = event.node_thread};
  allocation.ever_saved = true;
  if (replaces(allocation)) allocation.saving_nodes.clear();
  allocation.saving_nodes.push_back(saving_node);
  saved_->add(allocation, saving_node);
}

}  // namespace oomdiag
