#include "profiler/explain/step/what_if.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/evidence/autocast_cache.h"
#include "profiler/replay/evidence/categories.h"
#include "profiler/replay/history.h"

namespace oomdiag {
namespace {

/// What must be known of all blocks to find out whether one follows the batch.
struct Hints {
  std::set<int64_t> sizes{};  ///< of parameters: what backward makes of this size is for AccumulateGrad
  bool knows_saved = false;   ///< it is known what autograd saves
};

Hints read_hints(const Allocations& blocks) {
  Hints hints;
  for (const StepAllocation& block : blocks) {
    if (block.category == Category::parameter || block.category == Category::gradient) hints.sizes.insert(block.bytes);
    hints.knows_saved = hints.knows_saved || (block.ever_saved && block.category != Category::parameter);
  }
  return hints;
}

}  // namespace

bool is_weight_cast(const StepAllocation& block, const std::set<int64_t>& parameter_sizes) {
  const bool cast = !block.made.autocast.empty() && block.made.node.empty() && makes_copy(block.made.inner);
  return cast && block.phase == Phase::forward && parameter_sizes.contains(2 * block.bytes);
}

std::set<int64_t> list_parameter_sizes(const Allocations& blocks) { return read_hints(blocks).sizes; }

namespace {

// The batch itself is saved, or given up for the next one; a data set is neither.
bool is_batch(const StepAllocation& block, const Hints& hints) {
  if (block.ever_saved || block.died != StepAllocation::kNever) return true;
  return block.category == Category::input && !hints.knows_saved;
}

bool follows_batch(const StepAllocation& block, const Hints& hints) {
  if (block.category == Category::workspace) return workspace_follows_batch(block.made);
  if (traits_of(block.category).of_model || block.freed_by_accumulate || is_weight_cast(block, hints.sizes))
    return false;
  switch (block.phase) {
    case Phase::setup:
      return is_batch(block, hints);
    case Phase::forward:
      return true;
    case Phase::backward:
      return block.category == Category::activation || !hints.sizes.contains(block.bytes);
    case Phase::other: {
      const bool is_of_data_set = !block.is_of_step() && block.died == StepAllocation::kNever;
      return block.ever_saved || (block.category == Category::input && !is_of_data_set);
    }
    case Phase::optimizer:
      return follows_batch_in_optimizer(block.category);
  }
  return false;
}

bool is_floating(std::string_view shape) { return shape.find("float") != shape.npos; }

}  // namespace

bool workspace_follows_batch(const Where& made) { return !is_gemm(made.inner); }

bool follows_batch_in_optimizer(Category category) {
  return traits_of(category).follows_batch && category != Category::temporary;
}

std::optional<bool> builds_graph(const StepAllocations& step) {
  bool is_shown = false;
  for (const StepAllocation& block : step.blocks) {
    if (block.is_of_step() && block.in_graph) return true;
    is_shown |= block.is_of_step() && !block.made.module.empty();
  }
  return is_shown ? std::optional(false) : std::nullopt;
}

std::vector<int64_t> list_bytes_in_use(const Allocations& blocks) {
  uint32_t length = 0;
  for (const StepAllocation& block : blocks) {
    length = std::max(length, block.born);
    if (block.died != StepAllocation::kNever) length = std::max(length, block.died);
  }
  std::vector<int64_t> bytes(size_t{length} + 2);  // first the change at each position
  for (const StepAllocation& block : blocks) {
    if (block.died <= block.born) continue;
    bytes[block.born] += block.bytes;
    if (block.died != StepAllocation::kNever) bytes[block.died] -= block.bytes;
  }
  std::partial_sum(bytes.begin(), bytes.end(), bytes.begin());
  return bytes;
}

int64_t find_peak(const Allocations& blocks) {
  return std::max<int64_t>(0, std::ranges::max(list_bytes_in_use(blocks)));
}

uint32_t find_backward(const Allocations& blocks) {
  const auto found = std::find_if(blocks.begin(), blocks.end(), [](const StepAllocation& block) {
    return block.phase == Phase::backward && block.is_of_step();
  });
  return found == blocks.end() ? StepAllocation::kNever : found->born;
}

uint32_t find_last_backward(const Allocations& blocks) {
  uint32_t last = 0;
  for (const StepAllocation& block : blocks) {
    if (block.phase == Phase::backward && block.is_of_step()) last = std::max(last, block.born);
  }
  return last;
}

bool follows_batch(const StepAllocation& block, const Allocations& blocks) {
  return follows_batch(block, read_hints(blocks));
}

Allocations scale_batch(Allocations blocks, int64_t numerator, int64_t denominator) {
  const Hints hints = read_hints(blocks);
  for (StepAllocation& block : blocks) {
    if (!follows_batch(block, hints)) continue;
    const double bytes =
        static_cast<double>(block.bytes) * static_cast<double>(numerator) / static_cast<double>(denominator);
    block.bytes = round_size(static_cast<int64_t>(std::min(bytes, static_cast<double>(kMaxSaneBytes))), {});
  }
  return blocks;
}

bool is_mostly_float32(const Allocations& blocks) {
  int64_t single[2] = {}, other[2] = {};
  for (const StepAllocation& block : blocks) {
    if (!is_floating(block.shape)) continue;
    const size_t which = block.category == Category::parameter ? 0 : 1;
    (block.shape.ends_with(" float32") ? single : other)[which] += block.bytes;
  }
  const size_t which = single[0] + other[0] > 0 ? 0 : 1;
  return single[which] >= other[which];
}

bool is_inside(std::string_view module, std::string_view prefix) {
  return module.starts_with(prefix) && (module.size() == prefix.size() || module[prefix.size()] == '.');
}

}  // namespace oomdiag
