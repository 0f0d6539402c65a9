#pragma once

#include <cstdint>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/earlier_levels.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/trace/evenly_spaced.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Follows how many bytes of each place of the program live, and samples them where steps end, so that growth from step to
/// step can be known (explain/growth.h). A place is a context of the trace. Of long runs kMaxSamples evenly spread ones
/// are kept. Time: constant per event, and the number of places per sample.
class GrowthSamples {
 public:
  static constexpr uint32_t kMaxSamples = 32;

  /// Starts from the blocks of this device that are older than the trace's events.
  void start_from(const Trace& trace, uint8_t device);
  /// An alloc event. False: it makes no sense and does not count.
  bool add(const Event& alloc);
  /// This block was freed.
  void remove(const Allocation& allocation);
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
  struct Sample {
    uint32_t step = 0;
    double workload = 1;
    std::vector<PlaceLevel> levels;  ///< by context
  };
  /// Where the whole run is looked at.
  struct Run {
    std::vector<uint32_t> earlier{};  ///< steps whose events were overwritten
    std::vector<size_t> samples{};    ///< then these of `samples_`
  };
  Run choose_run(const Trace& trace) const;
  double measure_workload() const;
  static PlaceLevel level(const Sample& sample, size_t place);

  std::vector<Place> places_;  ///< by context
  EvenlySpaced<Sample> samples_{kMaxSamples};
  EarlierLevels earlier_;
};

}  // namespace oomdiag
