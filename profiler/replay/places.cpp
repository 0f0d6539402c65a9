#include "profiler/replay/places.h"

#include <algorithm>

#include "profiler/replay/rounding.h"

namespace oomdiag {
namespace {

constexpr uint32_t kMostPlaces = 1 << 20;  // more come from a damaged trace

/// Where something is kept for good the curve ends above its beginning. The others are not worth their memory.
bool ends_higher(const PlaceCurve& curve) {
  return !curve.bytes.empty() && curve.bytes.back() > *std::min_element(curve.bytes.begin(), curve.bytes.end());
}

}  // namespace

void PlaceMeter::add(const Event& alloc) {
  if (alloc.context >= kMostPlaces || alloc.bytes < 0 || alloc.bytes > kMaxSaneBytes) return;
  if (alloc.context >= places_.size()) places_.resize(alloc.context + 1);
  Place& place = places_[alloc.context];
  if (place.bytes > kMostBytes) return;
  place.bytes += alloc.bytes;
  ++place.blocks;
  place.largest = std::max(place.largest, alloc.bytes);
  place.newest = alloc;
}

void PlaceMeter::remove(uint32_t context, int64_t bytes) {
  if (context >= places_.size()) return;
  places_[context].bytes -= bytes;
  --places_[context].blocks;
}

void PlaceMeter::end_step(uint32_t step) {
  if (step == 0 || (step - 1) % stride_ != 0) return;
  if (samples_.size() == kMostSamples) {
    for (size_t i = 1; i < kMostSamples / 2; ++i) samples_[i] = std::move(samples_[2 * i]);
    samples_.resize(kMostSamples / 2);
    stride_ *= 2;
    if ((step - 1) % stride_ != 0) return;
  }
  Sample& sample = samples_.emplace_back();
  sample.step = step;
  for (Place& place : places_) {
    sample.levels.push_back({place.bytes, place.blocks});
    if (samples_.size() == 1) place.first_largest = place.largest;
  }
  sample.workload = measure_workload();
  for (Place& place : places_) place.largest = 0;
}

// How much larger the requests are than in the first step: the median over all places that asked in both.
double PlaceMeter::measure_workload() const {
  std::vector<double> ratios;
  for (const Place& place : places_) {
    const bool counts = place.first_largest >= kMinBlockBytes && place.largest > 0;
    if (counts) ratios.push_back(static_cast<double>(place.largest) / static_cast<double>(place.first_largest));
  }
  if (ratios.empty()) return 1;
  const auto middle = ratios.begin() + static_cast<std::ptrdiff_t>(ratios.size() / 2);
  std::nth_element(ratios.begin(), middle, ratios.end());
  return *middle;
}

StepCurves PlaceMeter::finish(const Trace& trace, const NodeTable& nodes) const {
  StepCurves curves;
  for (const Sample& sample : samples_) {
    curves.steps.push_back(sample.step);
    curves.workload.push_back(sample.workload);
  }
  for (size_t p = 0; p < places_.size(); ++p) {
    PlaceCurve curve;
    for (const Sample& sample : samples_) {
      const Level level = p < sample.levels.size() ? sample.levels[p] : Level{};
      curve.bytes.push_back(level.bytes);
      curve.blocks.push_back(level.blocks);
    }
    if (!ends_higher(curve)) continue;
    const Event& newest = places_[p].newest;
    curve.where = locate(trace, nodes, newest);
    curve.in_graph = (trace.context(newest.context).flags & kGradMode) != 0 && !in_node(newest);
    curve.newest = newest.sequence;
    curves.places.push_back(std::move(curve));
  }
  return curves;
}

}  // namespace oomdiag
