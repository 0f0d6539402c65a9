#pragma once

#include <cstdint>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/trace/evenly_spaced.h"

namespace oomdiag {

/// Keeps a curve of any length in at most kMaxPoints points. Each point stands for a run of equally many events and is
/// the highest of them, so the peak is always among them; when there are too many points, neighbours are joined.
class Timeline {
 public:
  static constexpr size_t kMaxPoints = 2000;

  /// Takes the next point of the curve.
  void add(const TimelinePoint& point) {
    last_ = point;
    if (in_run_ == 0) [[unlikely]] {
      begin_run();
    } else if (last_.allocated_bytes > points_.back().allocated_bytes) {
      points_.back() = last_;
    }
    in_run_ = in_run_ + 1 == run_ ? 0 : in_run_ + 1;
  }

  /// The points, in order; the last one of the curve is always there.
  std::vector<TimelinePoint> finish() const {
    auto points = points_;
    if (!points.empty() && points.back().event != last_.event) points.push_back(last_);
    return points;
  }

 private:
  void begin_run();
  void halve();

  std::vector<TimelinePoint> points_;
  TimelinePoint last_;
  uint64_t run_ = 1;     ///< events per point
  uint64_t in_run_ = 0;  ///< of them, how many the newest point has seen
};

/// What is allocated where steps end. Of long runs every 2nd, 4th, … step, so that they stay evenly spaced; the last one is
/// always there.
class StepEnds {
 public:
  static constexpr size_t kMaxSteps = 2000;

  void add(const StepEnd& end);
  std::vector<StepEnd> finish() const;

 private:
  EvenlySpaced<StepEnd> ends_{kMaxSteps};
  StepEnd last_;
};

/// The highest allocated bytes of each phase of each step; of long runs the first and last steps and the highest of all.
class PhasePeaks {
 public:
  static constexpr size_t kMaxPeaks = 512;

  void add(uint32_t step, Phase phase, int64_t allocated_bytes);
  std::vector<PhasePeak> finish() const;

 private:
  std::vector<PhasePeak> peaks_;
  PhasePeak highest_;
};

}  // namespace oomdiag
