#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/replay/join.h"

namespace oomdiag {

/// Follows how many bytes of each place of the program live, and samples them where steps end, so that growth from step to
/// step can be told (explain/growth.h). A place is a context of the trace. Of long runs kMostSamples evenly spread ones
/// are kept. Time: constant per event, and the number of places per sample.
class PlaceMeter {
 public:
  static constexpr size_t kMostSamples = 32;

  /// An alloc event, or that of a block from before the trace.
  void add(const Event& alloc);
  /// A block of `bytes` requested that a place with this context made was freed.
  void remove(uint32_t context, int64_t bytes);
  /// Says that this step has ended.
  void end_step(uint32_t step);

  StepCurves finish(const Trace& trace, const NodeTable& nodes) const;

 private:
  struct Place {
    int64_t bytes = 0, blocks = 0;  ///< alive
    int64_t largest = 0;            ///< request since the last sample
    int64_t first_largest = 0;      ///< … before the first sample
    Event newest{};
  };
  struct Level {
    int64_t bytes = 0, blocks = 0;
  };
  struct Sample {
    uint32_t step = 0;
    double workload = 1;
    std::vector<Level> levels;  ///< by context
  };
  double measure_workload() const;

  std::vector<Place> places_;  ///< by context
  std::vector<Sample> samples_;
  uint32_t stride_ = 1;
};

}  // namespace oomdiag
