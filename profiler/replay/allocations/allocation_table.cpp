#include "profiler/replay/allocations/allocation_table.h"

#include <utility>

namespace oomdiag {

uint32_t AllocationTable::add(Allocation allocation, uint64_t address) {
  const auto [place, is_fresh] = at_[allocation.device].insert(address);
  if (!is_fresh) release(*place);
  auto id = static_cast<uint32_t>(allocations_.size());
  if (unused_.empty()) {
    allocations_.push_back(std::move(allocation));
    attached_.push_back(true);
  } else {
    id = unused_.back();
    unused_.pop_back();
    allocations_[id] = std::move(allocation);
    attached_[id] = true;
  }
  *place = id;
  return id;
}

void AllocationTable::detach(uint8_t device, uint64_t address) {
  if (const auto id = at_[device].take(address)) release(*id);
}

void AllocationTable::release(uint32_t id) {
  attached_[id] = false;
  if (allocations_[id].views == 0) retire(id);
}

void AllocationTable::let_go(uint32_t id) {
  if (--allocations_[id].views == 0 && !attached_[id]) retire(id);
}

std::vector<uint32_t> AllocationTable::living(uint8_t device) const {
  std::vector<uint32_t> ids;
  for (uint32_t id = 0; id < allocations_.size(); ++id) {
    if (attached_[id] && allocations_[id].device == device && allocations_[id].alive()) ids.push_back(id);
  }
  return ids;
}

void AllocationTable::retire(uint32_t id) {
  allocations_[id].saving_nodes = {};
  unused_.push_back(id);
}

}  // namespace oomdiag
