#include "profiler/replay/steps/timeline.h"

#include <algorithm>

#include "profiler/replay/history.h"

namespace oomdiag {

void Timeline::begin_run() {
  if (points_.size() == kMaxPoints - 1) halve();
  points_.push_back(last_);
}

void Timeline::halve() {
  size_t kept = 0;
  for (size_t i = 0; i < points_.size(); i += 2) {
    const bool second = i + 1 < points_.size() && points_[i + 1].allocated_bytes > points_[i].allocated_bytes;
    points_[kept++] = points_[second ? i + 1 : i];
  }
  points_.resize(kept);
  run_ *= 2;
}

void PhasePeaks::add(uint32_t step, Phase phase, int64_t allocated_bytes) {
  if (allocated_bytes > highest_.allocated_bytes) highest_ = {step, phase, allocated_bytes};
  // A step has few phases: what we look for is at the end.
  for (auto peak = peaks_.rbegin(); peak != peaks_.rend() && peak->step == step; ++peak) {
    if (peak->phase != phase) continue;
    peak->allocated_bytes = std::max(peak->allocated_bytes, allocated_bytes);
    return;
  }
  if (peaks_.size() == kMaxPeaks) {
    peaks_.erase(peaks_.begin() + kMaxPeaks / 4, peaks_.begin() + kMaxPeaks / 2);
  }
  peaks_.push_back({step, phase, allocated_bytes});
}

void StepEnds::add(const StepEnd& end) {
  last_ = end;
  if (StepEnd* place = ends_.next()) *place = end;
}

std::vector<StepEnd> StepEnds::finish() const {
  auto ends = ends_.entries();
  if (!ends.empty() && ends.back() != last_) ends.push_back(last_);
  return ends;
}

std::vector<PhasePeak> PhasePeaks::finish() const {
  auto peaks = peaks_;
  if (peaks.empty() || std::find(peaks.begin(), peaks.end(), highest_) != peaks.end()) return peaks;
  const auto later = [](uint32_t step, const PhasePeak& peak) { return step < peak.step; };
  peaks.insert(std::upper_bound(peaks.begin(), peaks.end(), highest_.step, later), highest_);
  return peaks;
}

}  // namespace oomdiag
