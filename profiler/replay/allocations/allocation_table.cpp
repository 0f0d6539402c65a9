#include "profiler/replay/allocations/allocation_table.h"

#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace oomdiag {
namespace {

/// A row that comes soon: of very many, it is in no cache.
void prefetch(const Allocation* row) {
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < sizeof *row; at += kLine) __builtin_prefetch(reinterpret_cast<const char*>(row) + at, 1);
}

}  // namespace

// The row is made where it lies. Only the room of its nodes is kept, which most rows need again.
uint32_t AllocationTable::add(uint8_t device) {
  auto id = static_cast<uint32_t>(allocations_.size());
  if (unused_.empty()) {
    allocations_.emplace_back();
  } else {
    id = unused_.back();
    unused_.pop_back();
    constexpr size_t kAhead = 4;
    if (unused_.size() >= kAhead) prefetch(&allocations_[unused_[unused_.size() - kAhead]]);
    std::vector<SavingNode> room = std::move(allocations_[id].saving_nodes);
    std::construct_at(&allocations_[id])->saving_nodes = std::move(room);
  }
  Allocation& allocation = allocations_[id];
  allocation.number = next_number_++;
  allocation.device = device;
  allocation.attached = true;
  return id;
}

void AllocationTable::detach(uint32_t id) {
  allocations_[id].attached = false;
  if (allocations_[id].views == 0) retire(id);
}

void AllocationTable::let_go(uint32_t id) {
  if (--allocations_[id].views == 0 && !allocations_[id].attached) retire(id);
}

void AllocationTable::let_go(std::span<const uint32_t> ids) {
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) prefetch(&allocations_[ids[i + kAhead]]);
    let_go(ids[i]);
  }
}

std::vector<uint32_t> AllocationTable::living(uint8_t device, uint32_t end) const {
  std::vector<uint32_t> ids;
  for (uint32_t id = 0; id < allocations_.size(); ++id) {
    const Allocation& allocation = allocations_[id];
    const bool living = allocation.attached && allocation.alive();
    if (living && allocation.device == device && allocation.number < end) ids.push_back(id);
  }
  return ids;
}

void AllocationTable::retire(uint32_t id) {
  allocations_[id].saving_nodes.clear();
  unused_.push_back(id);
}

}  // namespace oomdiag
