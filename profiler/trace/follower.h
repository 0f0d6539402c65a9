#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "profiler/event.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/format.h"

namespace oomdiag {

/// The newest figures of a program that runs; of its first GPU.
struct LiveFigures {
  uint32_t step = 0;            ///< the optimizer step that runs, from 1; 0 before anything was allocated
  int64_t allocated_bytes = 0;  ///< requested, not rounded
  int64_t reserved_bytes = 0;
  int64_t peak_allocated_bytes = 0;
  int64_t total_bytes = 0;
  int64_t non_pytorch_bytes = 0;  ///< taken by others, as far as the trace says
  uint64_t ooms = 0;              ///< OOMs so far
  std::vector<int64_t>
      step_peaks{};  ///< of the last steps that are over, oldest first; bytes allocated, at most kMaxStepPeaks

  static constexpr size_t kMaxStepPeaks = 32;

  int64_t free_bytes() const;
  bool operator==(const LiveFigures&) const = default;
};

/// Follows a trace while it is written, from another process. Reads only what is new, and asks nothing of the writer. A file
/// that is cut off meanwhile shows nothing more, and does no harm.
class TraceFollower {
 public:
  /// Null if `file` is no trace (yet).
  static std::unique_ptr<TraceFollower> open(const std::filesystem::path& file);

  /// Reads the events that were written since, and gives the figures after them.
  const LiveFigures& read_on();

 private:
  explicit TraceFollower(const std::filesystem::path& file);
  struct Place {
    uint64_t first_sequence = 0;  ///< of the chunk when it was last read; another one means that it was taken again
    uint64_t next = 0;            ///< index of the first event that was not read
    uint64_t last_sequence = 0;
  };
  template <class T>
  T read_value(uint64_t offset) const;
  void read_chunk(uint64_t chunk, std::vector<Event>& events);
  void take(const Event& event);
  void end_step();
  bool is_optimizer_step(uint64_t name);
  void read_names();

  InputFile file_;
  TraceHeader header_;                 ///< as it was at the beginning
  std::vector<Place> places_;          ///< by chunk
  std::vector<bool> optimizer_names_;  ///< of each name: whether it is that of an optimizer's step
  uint64_t names_read_ = 0;            ///< bytes
  LiveFigures figures_;
  int64_t step_peak_ = 0;  ///< of the step that runs
};

}  // namespace oomdiag
