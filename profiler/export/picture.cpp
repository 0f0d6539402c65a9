#include "profiler/export/picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "profiler/export/owner_tree.h"
#include "profiler/export/pieces.h"
#include "profiler/replay/history.h"
#include "profiler/report/make/holders.h"
#include "profiler/report/report.h"
#include "profiler/report/words/place_text.h"

namespace oomdiag {
namespace {

int64_t sum_of(const BandPoint& point) {
  int64_t sum = 0;
  for (const int64_t bytes : point.bytes) sum += bytes;
  return sum;
}

// Of each few positions the highest.
std::vector<BandPoint> thin(const std::vector<BandPoint>& points) {
  if (points.size() <= kMaxBandPoints) return points;
  std::vector<BandPoint> kept;
  const size_t stride = (points.size() + kMaxBandPoints - 1) / kMaxBandPoints;
  for (size_t begin = 0; begin < points.size(); begin += stride) {
    const auto first = points.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = points.begin() + static_cast<std::ptrdiff_t>(std::min(begin + stride, points.size()));
    kept.push_back(*std::max_element(first, last, [](const auto& a, const auto& b) { return sum_of(a) < sum_of(b); }));
  }
  return kept;
}

std::vector<PhaseSpan> find_phases(const std::vector<StepAllocation>& blocks) {
  std::vector<PhaseSpan> spans;
  for (const StepAllocation& block : blocks) {
    if (!block.is_of_step()) continue;
    const std::string phase(name_of(block.phase));
    if (spans.empty() || spans.back().phase != phase) spans.push_back({phase, block.born, block.born});
    spans.back().last = block.born;
  }
  return spans;
}

std::string label_with_shape(const LiveBlock& block) {
  return block.shape.empty() ? std::string(label_of(block)) : fmt::format("{}  {}", label_of(block), block.shape);
}

std::string place_of(const LiveBlock& block) {
  return joined_by_arrows({block.made.node, block.made.op, block.made.module, block.made.source});
}

// A piece that is narrower than can be seen joins the one before it, whatever it is.
void add_piece(std::vector<DrawnBlock>& pieces, DrawnBlock piece, int64_t least) {
  if (!pieces.empty() && piece.bytes < least && pieces.back().bytes < least) {
    pieces.back().bytes += piece.bytes;
    if (pieces.back().category != piece.category) pieces.back().category = "mixed";
    pieces.back().label = "small blocks";
    pieces.back().place.clear();
    return;
  }
  pieces.push_back(std::move(piece));
}

DrawnSegment draw_segment(const SegmentLayout& segment, const BlocksByAddress& blocks) {
  constexpr int64_t kLeastShare = 600;
  DrawnSegment drawn{.bytes = segment.bytes,
                     .used_bytes = segment.used_bytes,
                     .largest_free_block_bytes = segment.largest_free_block_bytes,
                     .small = segment.small,
                     .expandable = segment.expandable,
                     .is_private = segment.pool != 0};
  const int64_t least = segment.bytes / kLeastShare;
  for_each_piece(segment, blocks, [&](int64_t offset, int64_t bytes, const LiveBlock* live) {
    if (live == nullptr) return add_piece(drawn.blocks, {offset, bytes, "free"}, least);
    const std::string category(live->pending_free ? "pending_free" : name_of(live->category));
    add_piece(drawn.blocks, {offset, bytes, category, label_with_shape(*live), place_of(*live)}, least);
  });
  return drawn;
}

std::vector<DrawnSegment> draw_segments(const MemoryState& state) {
  const BlocksByAddress blocks = by_address(state.blocks);
  std::vector<const SegmentLayout*> segments;
  for (const SegmentLayout& segment : state.segments) segments.push_back(&segment);
  std::ranges::stable_sort(segments, std::greater{}, [](const SegmentLayout* one) { return one->bytes; });
  if (segments.size() > kMaxSegments) segments.resize(kMaxSegments);
  std::vector<DrawnSegment> drawn;
  for (const SegmentLayout* segment : segments) drawn.push_back(draw_segment(*segment, blocks));
  return drawn;
}

}  // namespace

StepBands draw_step(const StepAllocations& step_allocations) {
  StepBands bands{.step = step_allocations.step};
  if (step_allocations.step == 0 || step_allocations.blocks.empty()) return {};
  uint32_t last = 0;
  for (const StepAllocation& block : step_allocations.blocks) {
    last = std::max(last, block.born);
    if (block.died != StepAllocation::kNever) last = std::max(last, block.died);
  }
  std::vector<BandPoint> points(last + 1);
  for (const StepAllocation& block : step_allocations.blocks) {
    const auto category = static_cast<size_t>(block.category);
    points[block.born].bytes[category] += block.bytes;
    if (block.died != StepAllocation::kNever) points[block.died].bytes[category] -= block.bytes;
  }
  for (uint32_t i = 0; i <= last; ++i) {
    points[i].position = i;
    if (!step_allocations.events.empty())
      points[i].event = step_allocations.events[std::clamp<size_t>(i, 1, step_allocations.events.size()) - 1];
    for (size_t c = 0; i > 0 && c < kCategoryCount; ++c) points[i].bytes[c] += points[i - 1].bytes[c];
  }
  bands.points = thin(points);
  bands.phases = find_phases(step_allocations.blocks);
  return bands;
}

GpuPicture draw_gpu(const DeviceHistory& device) {
  OwnerTree tree;
  for (const LiveBlock& block : device.state.blocks) {
    if (!block.pending_free) tree.add(path_of(block), block.bytes, 1);
  }
  return {.owners = std::move(tree).finish(),
          .step = draw_step(device.step_allocations),
          .segments = draw_segments(device.state)};
}

GpuPicture draw_gpu(const ReportOfDevice& device) {
  OwnerTree tree;
  const auto add = [&](const ReportHolder& holder) {
    const std::string path[] = {std::string(name_of(holder.category)), holder.name, holder.op, holder.source};
    tree.add(path, holder.bytes, holder.blocks);
  };
  std::ranges::for_each(device.top_allocations, add);
  std::ranges::for_each(list_others(device), add);
  return {.owners = std::move(tree).finish()};
}

}  // namespace oomdiag
