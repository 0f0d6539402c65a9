#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "profiler/explain/remedy_rules.h"

// Checkpointing of modules (torch.utils.checkpoint, not reentrant). What a module saves for itself is freed in forward and
// made again when backward comes to the module:
//
//   as it is       ──┬── forward ───────────────────────────── backward of m ──┬──
//                    └ saved ──────────────────────────────────────────────────┘
//   checkpointed   ──┬┬─ forward ──────────────────────────┬── backward of m ──┬──
//                    └┘ freed at once                      └ made again ───────┘
//
// What another module saves too is the border between them: it stays up to there, as the backward of all who take it comes
// before that of m, and is made again for m itself.

namespace oomdiag {
namespace {

struct Segment {
  uint32_t backward = BlockLife::kNever;  ///< where its first node allocates
  size_t interior = 0;                    ///< blocks that only it saves
};

// "layer3.5.conv2" cut to 2 components is "layer3.5"; modules that lie less deep are no segment.
std::string_view cut_path(std::string_view path, size_t components) {
  size_t end = 0;
  for (size_t i = 0; i < components; ++i) {
    if (end == path.npos || end >= path.size()) return {};
    end = path.find('.', i == 0 ? 0 : end + 1);
  }
  return path.substr(0, end);
}

bool is_saved_outside(const BlockLife& block, std::string_view segment) {
  return std::any_of(block.saved_by.begin(), block.saved_by.end(),
                     [&](const Where& saver) { return !is_inside(saver.module, segment); });
}

bool is_saved_inside(const BlockLife& block, std::string_view segment) {
  return std::any_of(block.saved_by.begin(), block.saved_by.end(),
                     [&](const Where& saver) { return is_inside(saver.module, segment); });
}

bool is_saved_in_forward(const BlockLife& block) {
  return block.category == Category::activation && block.phase == Phase::forward && block.born != BlockLife::kBefore;
}

using Segments = std::map<std::string_view, Segment>;

Segments find_segments(const Lives& blocks, size_t components) {
  Segments segments;
  for (const BlockLife& block : blocks) {
    const std::string_view path = cut_path(block.made.module, components);
    if (path.empty()) continue;
    Segment& segment = segments[path];
    if (block.phase == Phase::backward && block.born != BlockLife::kBefore)
      segment.backward = std::min(segment.backward, block.born);
    if (is_saved_in_forward(block) && !is_saved_outside(block, path)) ++segment.interior;
  }
  std::erase_if(segments, [](const auto& one) { return one.second.interior < 2; });
  return segments;
}

Lives checkpoint(Lives blocks, const Segments& segments, size_t components) {
  const uint32_t last_backward = find_last_backward(blocks);
  Lives again;
  for (BlockLife& block : blocks) {
    const auto segment = segments.find(cut_path(block.made.module, components));
    if (segment == segments.end() || !is_saved_in_forward(block)) continue;
    const bool border = is_saved_outside(block, segment->first);
    if (border && !is_saved_inside(block, segment->first)) continue;
    if (segment->second.backward != BlockLife::kNever) {
      again.push_back(block);
      again.back().born = std::max(segment->second.backward, block.born + 1);
      const bool outlives_backward = block.died > last_backward;  // the program holds it, too
      if (border && !outlives_backward) block.died = std::min(block.died, again.back().born);
    }
    if (!border) block.died = block.born + 1;
  }
  blocks.insert(blocks.end(), again.begin(), again.end());
  return blocks;
}

std::string label_of(const Segments& segments) {
  const std::string first(segments.begin()->first), last(segments.rbegin()->first);
  if (segments.size() == 1) return "checkpoint " + first;
  return "checkpoint " + first + (segments.size() == 2 ? ", " : " ... ") + last;
}

}  // namespace

/// Tries the modules at each depth of the tree, all that save two tensors or more for themselves alone, and takes the
/// depth with the lowest peak. Peak: interior tensors live from the backward of their module on only.
std::optional<Changed> checkpoint_modules(const Situation& situation) {
  constexpr size_t kDeepest = 5;
  std::optional<Changed> best;
  int64_t best_peak = 0;
  for (size_t components = 1; components <= kDeepest; ++components) {
    const Segments segments = find_segments(situation.lives.blocks, components);
    if (segments.empty()) continue;
    Lives blocks = checkpoint(situation.lives.blocks, segments, components);
    const int64_t peak = find_peak(blocks);
    if (best && peak >= best_peak) continue;
    best_peak = peak;
    best = Changed{.id = "checkpoint",
                   .label = label_of(segments),
                   .formula = "what only the module saves is freed in forward, and made again when its backward begins",
                   .blocks = std::move(blocks)};
    for (const auto& [path, segment] : segments) best->modules.emplace_back(path);
  }
  return best;
}

}  // namespace oomdiag
