#include "profiler/replay/allocations/earlier_levels.h"

#include <set>

#include "profiler/event.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

// A place that keeps the last N of what it makes looks, by those that live, as if it had begun to grow N steps ago. But
// then one is freed for each that is made.

void EarlierLevels::add(const Trace& trace, uint32_t index) {
  const Event& alloc = trace.initial[index];
  if (index >= blocks_.size()) blocks_.resize(index + 1);
  const bool counted = alloc.sequence != 0 && !trace.step_ends.empty();
  blocks_[index] = {
      .bytes = alloc.bytes, .context = alloc.context, .step = counted ? trace.step_of(alloc.sequence) : 0};
}

void EarlierLevels::remove(uint32_t index) {
  if (index < blocks_.size()) blocks_[index].freed_after = ends_;
}

std::map<uint32_t, std::vector<PlaceLevel>> EarlierLevels::made_after(std::span<const uint32_t> steps,
                                                                      uint32_t first_kept) const {
  std::map<uint32_t, std::vector<PlaceLevel>> made;
  std::set<uint32_t> replaced;
  for (const Earlier& block : blocks_) {
    if (block.freed_after < ends_) {
      const uint64_t made_in = block.step == 0 ? first_kept : block.step;  // or before
      if (first_kept + block.freed_after >= made_in + kPassingSteps) replaced.insert(block.context);
      continue;
    }
    std::vector<PlaceLevel>& place = made[block.context];
    place.resize(steps.size());
    for (size_t i = 0; i < steps.size() && steps[i] < block.step; ++i) {
      place[i].bytes += block.bytes;
      ++place[i].blocks;
    }
  }
  for (const uint32_t context : replaced) made.erase(context);
  return made;
}

}  // namespace oomdiag
