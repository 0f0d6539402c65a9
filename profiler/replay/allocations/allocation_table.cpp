#include "profiler/replay/allocations/allocation_table.h"

#include <utility>

namespace oomdiag {

uint32_t AllocationTable::add(Allocation&& allocation) {
  allocation.number = next_number_++;
  if (unused_.empty()) {
    allocations_.push_back(std::move(allocation));
    attached_.push_back(true);
    return static_cast<uint32_t>(allocations_.size() - 1);
  }
  const uint32_t id = unused_.back();
  unused_.pop_back();
  allocations_[id] = std::move(allocation);
  attached_[id] = true;
  return id;
}

void AllocationTable::detach(uint32_t id) {
  attached_[id] = false;
  if (allocations_[id].views == 0) retire(id);
}

void AllocationTable::let_go(uint32_t id) {
  if (--allocations_[id].views == 0 && !attached_[id]) retire(id);
}

std::vector<uint32_t> AllocationTable::living(uint8_t device, uint32_t end) const {
  std::vector<uint32_t> ids;
  for (uint32_t id = 0; id < allocations_.size(); ++id) {
    const Allocation& allocation = allocations_[id];
    if (attached_[id] && allocation.device == device && allocation.alive() && allocation.number < end)
      ids.push_back(id);
  }
  return ids;
}

void AllocationTable::retire(uint32_t id) {
  allocations_[id].saving_nodes = {};
  unused_.push_back(id);
}

}  // namespace oomdiag
