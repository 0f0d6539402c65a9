#include "profiler/explain/step/simulate_fits.h"

#include <algorithm>
#include <optional>

#include "profiler/explain/step/what_if.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/allocator/simulator.h"
#include "profiler/replay/history.h"

namespace oomdiag {
namespace {

/// Something that happens to a block.
struct Change {
  uint32_t position = 0;
  bool birth = false;
  size_t block = 0;
};

// Frees come first: a block whose death lies where another is born makes room for it.
std::vector<Change> order(const Allocations& blocks) {
  std::vector<Change> changes;
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (blocks[b].bytes <= 0 || blocks[b].died <= blocks[b].born) continue;
    changes.push_back({blocks[b].born, true, b});
    if (blocks[b].died != StepAllocation::kNever) changes.push_back({blocks[b].died, false, b});
  }
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
    return a.position != b.position ? a.position < b.position : !a.birth && b.birth;
  });
  return changes;
}

// What a first step finds: no gradients, and optimizer state only once its optimizer runs.
Allocations first_step_of(Allocations blocks) {
  uint32_t optimizer = 0, end = 0;
  for (const StepAllocation& block : blocks) {
    if (block.phase == Phase::optimizer && block.is_of_step() && optimizer == 0) optimizer = block.born;
    end = std::max(end, block.died == StepAllocation::kNever ? block.born : block.died);
  }
  for (StepAllocation& block : blocks) {
    if (block.is_of_step()) continue;
    if (block.category == Category::gradient) block.bytes = 0;
    if (block.category == Category::optimizer_state) block.born = optimizer == 0 ? end : optimizer;
  }
  return blocks;
}

/// A step in an allocator in which some of its blocks may live already.
bool run(AllocatorSimulator& allocator, const Allocations& blocks, std::vector<std::optional<uint32_t>>& at) {
  for (const Change& change : order(blocks)) {
    std::optional<uint32_t>& block = at[change.block];
    if (!change.birth) {
      if (block) allocator.free(*block);
      block.reset();
    } else if (!block) {
      block = allocator.allocate(blocks[change.block].bytes);
      if (*block == AllocatorSimulator::kRefused) return false;
    }
  }
  return true;
}

}  // namespace

bool simulate_fits(const Allocations& blocks, int64_t available_bytes, const AllocatorSettings& settings) {
  if (find_peak(blocks) > available_bytes) return false;
  if (settings.expandable_segments) return find_peak(blocks) + 2 * settings.large_segment_bytes <= available_bytes;
  if (blocks.size() > kMaxSimulated) return true;
  AllocatorSettings of_blocks = settings;  // their sizes are rounded already
  of_blocks.roundup_power2_divisions = {};
  AllocatorSimulator allocator(available_bytes, of_blocks);
  std::vector<std::optional<uint32_t>> at(blocks.size());
  if (!run(allocator, first_step_of(blocks), at)) return false;
  // What the step itself made and kept goes, as the next one makes it anew.
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (!blocks[b].is_of_step() || !at[b]) continue;
    allocator.free(*at[b]);
    at[b].reset();
  }
  return run(allocator, blocks, at);
}

bool simulate_fits_with_margin(const Allocations& blocks, int64_t available_bytes, const AllocatorSettings& settings) {
  return simulate_fits(blocks, available_bytes - available_bytes / 64, settings);
}

}  // namespace oomdiag
