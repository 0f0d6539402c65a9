#include "cli/reports/timeline_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/text/table.h"
#include "profiler/snapshot/timeline.h"

namespace oomdiag {
namespace {

bool is_chrome(const MemoryTimeline& timeline) { return timeline.kind == MemoryTimeline::Kind::chrome; }

const char* describe(MemoryTimeline::Kind kind) {
  switch (kind) {
    case MemoryTimeline::Kind::chrome:
      return "a Chrome trace of torch.profiler";
    case MemoryTimeline::Kind::sizes:
      return "a memory timeline of torch.profiler";
    case MemoryTimeline::Kind::raw:
      return "a raw memory timeline of torch.profiler";
  }
  return "";
}

/// "12.35": since the first in the file.
std::string milliseconds(const TimelineOfGpu& gpu, double time_us) {
  return fmt::format("{:.2f}", (time_us - gpu.begin_us) / 1000);
}

std::string gpus_table(const MemoryTimeline& timeline, const Unit& unit) {
  const bool has_details = is_chrome(timeline);  // which GPU it is, and what was reserved
  std::string text = "  " + padded(fmt::format("GPU, {}", unit.name), 24) +
                     fmt::format("{:>11}{}{:>13}{:>14}{:>10}\n", "peak", has_details ? "   reserved" : "", "at the end",
                                 "peak at, ms", "of, ms");
  for (const auto& [index, gpu] : timeline.gpus) {
    text += "    " + padded(has_details ? fmt::format("{}", index) : "not given", 22) +
            fmt::format("{:>11}{}{:>13}{:>14}{:>10}\n", in_unit(gpu.peak_bytes, unit),
                        has_details ? fmt::format("{:>11}", in_unit(gpu.peak_reserved_bytes, unit)) : "",
                        in_unit(gpu.end_bytes, unit), milliseconds(gpu, gpu.peak_us), milliseconds(gpu, gpu.end_us));
  }
  return text;
}

std::string categories_table(const TimelineOfGpu& gpu, bool unicode) {
  const Unit unit = unit_for(*std::ranges::max_element(gpu.peak));
  std::vector<size_t> order;
  for (size_t i = 0; i < gpu.peak.size(); ++i) {
    if (gpu.peak[i] != 0) order.push_back(i);
  }
  std::ranges::stable_sort(order, std::greater(), [&](size_t i) { return gpu.peak[i]; });
  std::string text = fmt::format("  at the peak, {}\n", unit.name);
  for (const size_t i : order) {
    text += "    " + padded(kTimelineCategories[i], 22) +
            fmt::format("{:>11}  {}\n", in_unit(gpu.peak[i], unit), bar(gpu.peak[i], gpu.peak_bytes, unicode));
  }
  return text;
}

}  // namespace

std::string to_text(const MemoryTimeline& timeline, bool unicode) {
  const auto& [index, fullest] =
      *std::ranges::max_element(timeline.gpus, {}, [](const auto& gpu) { return gpu.second.peak_bytes; });
  const std::string of_gpu = is_chrome(timeline) ? fmt::format(" on GPU {}", index) : "";
  std::string text =
      fmt::format("oomdiag: peak {}{}, {} ms into the profile        {}\n\n", with_unit(fullest.peak_bytes), of_gpu,
                  milliseconds(fullest, fullest.peak_us), describe(timeline.kind));
  int64_t largest = 0;
  for (const auto& [number, gpu] : timeline.gpus) {
    largest = std::max({largest, gpu.peak_bytes, gpu.peak_reserved_bytes});
  }
  text += gpus_table(timeline, unit_for(largest));
  if (!is_chrome(timeline)) text += "\n" + categories_table(fullest, unicode);
  text += "\n  what this file does not contain\n";
  constexpr size_t kColumns = 100;
  text += wrapped(
      "blocks, segments, lines and the size of the GPU: so neither who holds the bytes nor why a request failed",
      kColumns);
  if (is_chrome(timeline)) {
    text += wrapped("what the bytes are: gradients, activations, optimizer state", kColumns);
  } else {
    text +=
        wrapped("the GPU's number, reserved bytes, and of what was there before the profile only what an op in it used",
                kColumns);
  }
  if (timeline.kind == MemoryTimeline::Kind::sizes) {
    text += wrapped("a peak between two changes of the same microsecond, which are shown as one", kColumns);
  }
  return text +
         "\n  next: oomdiag run -- python train.py\n"
         "        or in the program: torch.cuda.memory._record_memory_history(), and at the end or in\n"
         "        `except torch.OutOfMemoryError`: torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")\n";
}

}  // namespace oomdiag
