#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"

// What the exports draw besides the report itself: values, small enough for a page whatever the trace's size.
namespace oomdiag {

/// Who holds bytes, as a tree: category, modules from the outside in, op, line. A node holds what its children hold.
struct OwnerNode {
  std::string name;
  int64_t bytes = 0, blocks = 0;
  std::vector<OwnerNode> children{};  ///< the largest first; what is too small to be seen is one node "others"

  bool operator==(const OwnerNode&) const = default;
};

/// A moment of a step: what each category held.
struct BandPoint {
  uint32_t position = 0;  ///< the n-th allocation or free of the step
  uint64_t event = 0;     ///< its index in the trace
  std::array<int64_t, kCategoryCount> bytes{};

  bool operator==(const BandPoint&) const = default;
};

struct PhaseSpan {
  std::string phase;
  uint32_t first = 0, last = 0;  ///< positions

  bool operator==(const PhaseSpan&) const = default;
};

/// A step, allocation by allocation. After an OOM its end is the failed request, as if it had been granted.
struct StepBands {
  uint32_t step = 0;                ///< 0: there is none
  std::vector<BandPoint> points{};  ///< at most kMaxBandPoints, the highest always among them
  std::vector<PhaseSpan> phases{};

  bool operator==(const StepBands&) const = default;
};
inline constexpr size_t kMaxBandPoints = 1200;

/// A piece of a segment. Neighbours too small to be seen are one piece.
struct DrawnBlock {
  int64_t offset = 0, bytes = 0;
  std::string category;  ///< "free", "pending_free" or a Category
  std::string label{};
  std::string place{};  ///< where it was made: op ← module ← line

  bool operator==(const DrawnBlock&) const = default;
};

struct DrawnSegment {
  int64_t bytes = 0, used_bytes = 0, largest_free_block_bytes = 0;
  bool small = false, expandable = false, is_private = false;
  std::vector<DrawnBlock> blocks{};  ///< without gaps

  bool operator==(const DrawnSegment&) const = default;
};
inline constexpr size_t kMaxSegments = 120;

/// One GPU of a report, at the moment that it describes.
struct GpuPicture {
  OwnerNode owners{};
  StepBands step{};
  std::vector<DrawnSegment> segments{};  ///< the largest first, at most kMaxSegments

  bool operator==(const GpuPicture&) const = default;
};

/// Draws a GPU from all that its trace has.
GpuPicture draw_gpu(const DeviceHistory& device);

/// Draws a step; of a step that is not there, nothing.
StepBands draw_step(const StepAllocations& step_allocations);

/// Draws what a report alone has: owners.
GpuPicture draw_gpu(const ReportOfDevice& device);

}  // namespace oomdiag
