#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>

namespace oomdiag {

/// What torch.profiler calls the bytes of its memory timelines, in the order in which it writes them
/// (torch/profiler/_memory_profiler.py, _CATEGORY_TO_INDEX).
inline constexpr std::array<const char*, 8> kTimelineCategories = {"parameters",       "optimizer state", "inputs",
                                                                   "temporaries",      "activations",     "gradients",
                                                                   "autograd details", "unknown"};

/// What a timeline shows of one GPU.
struct TimelineOfGpu {
  uint64_t changes = 0;
  double begin_us = 0, end_us = 0, peak_us = 0;
  int64_t peak_bytes = 0, end_bytes = 0;
  int64_t peak_reserved_bytes = 0;                         ///< the most there was at any time; of Chrome traces only
  std::array<int64_t, kTimelineCategories.size()> peak{};  ///< by category at the peak; not of Chrome traces

  bool operator==(const TimelineOfGpu&) const = default;
};

/// Totals over time, as torch.profiler exports them: no blocks, no stacks.
struct MemoryTimeline {
  enum class Kind : uint8_t {
    chrome,  ///< a Chrome trace with "[memory]" events (export_chrome_trace with profile_memory=True)
    sizes,   ///< [times, sizes by category] (export_memory_timeline to .json or .json.gz)
    raw,     ///< [[time, action, bytes, category], …] (… to .raw.json.gz)
  };
  Kind kind = Kind::chrome;
  std::map<int, TimelineOfGpu> gpus{};  ///< by index; 0 where the file does not name it
};

/// Reads such a file, packed by gzip or not, in one pass; keeps nothing of it but the answer, and of `sizes` the times. Throws
/// Error(input), with the format that it saw, for anything else and where it has nothing of a GPU.
MemoryTimeline read_timeline(const std::filesystem::path& file);

}  // namespace oomdiag
