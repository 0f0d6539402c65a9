#include "profiler/replay/allocations/allocation_table.h"

#include <utility>

namespace oomdiag {

uint32_t BlockTable::add(Row row, uint64_t address) {
  const uint8_t device = row.device;
  detach(device, address);
  auto id = static_cast<uint32_t>(rows_.size());
  if (unused_.empty()) {
    rows_.push_back(std::move(row));
    attached_.push_back(true);
  } else {
    id = unused_.back();
    unused_.pop_back();
    rows_[id] = std::move(row);
    attached_[id] = true;
  }
  at_[device][address] = id;
  return id;
}

void BlockTable::detach(uint8_t device, uint64_t address) {
  const uint32_t id = find(device, address);
  if (id == kNone) return;
  at_[device].erase(address);
  attached_[id] = false;
  if (rows_[id].views == 0) retire(id);
}

void BlockTable::let_go(uint32_t id) {
  if (--rows_[id].views == 0 && !attached_[id]) retire(id);
}

std::vector<uint32_t> BlockTable::living(uint8_t device) const {
  std::vector<uint32_t> ids;
  for (uint32_t id = 0; id < rows_.size(); ++id) {
    if (attached_[id] && rows_[id].device == device && rows_[id].alive()) ids.push_back(id);
  }
  return ids;
}

void BlockTable::retire(uint32_t id) {
  rows_[id].savers = {};
  unused_.push_back(id);
}

}  // namespace oomdiag
