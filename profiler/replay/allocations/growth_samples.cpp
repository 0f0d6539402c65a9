#include "profiler/replay/allocations/growth_samples.h"

#include <algorithm>

#include "profiler/event.h"
#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/allocations/earlier_levels.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

constexpr uint32_t kMaxContexts = 1 << 20;  // more come from a damaged trace

/// Where something is kept for good the curve ends above its beginning. The others are not worth their memory.
bool ends_higher(const std::vector<int64_t>& bytes) {
  return !bytes.empty() && bytes.back() > *std::min_element(bytes.begin(), bytes.end());
}

/// Steps from `first` to `last`, both among them and the others evenly spread.
std::vector<uint32_t> spread_steps(uint32_t first, uint32_t last) {
  const uint32_t stride = (last - first) / GrowthSamples::kMaxSamples + 1;
  std::vector<uint32_t> steps;
  for (uint32_t step = last; step > first; step -= std::min(stride, step - first)) steps.push_back(step);
  steps.push_back(first);
  return {steps.rbegin(), steps.rend()};
}

}  // namespace

void GrowthSamples::start_from(const Trace& trace, uint8_t device) {
  for (uint32_t i = 0; i < trace.initial.size(); ++i) {
    if (trace.initial[i].device == device && add(trace.initial[i])) earlier_.add(trace, i);
  }
}

bool GrowthSamples::add(const Event& alloc) {
  if (alloc.context >= kMaxContexts || alloc.bytes < 0 || alloc.bytes > kMaxSaneBytes) return false;
  if (alloc.context >= places_.size()) places_.resize(alloc.context + 1);
  Place& place = places_[alloc.context];
  if (place.bytes > kMaxBytes) return false;
  place.bytes += alloc.bytes;
  ++place.blocks;
  place.largest = std::max(place.largest, alloc.bytes);
  place.newest = alloc;
  return true;
}

void GrowthSamples::remove(const Allocation& allocation) {
  if (allocation.is_initial()) earlier_.remove(allocation.event & ~Block::kInitial);
  if (allocation.maker.context >= places_.size()) return;
  places_[allocation.maker.context].bytes -= allocation.maker.bytes;
  --places_[allocation.maker.context].blocks;
}

void GrowthSamples::end_step(uint32_t step) {
  earlier_.end_step();
  Sample* sample = step == 0 ? nullptr : samples_.next();
  if (sample == nullptr) return;
  sample->step = step;
  for (Place& place : places_) {
    sample->levels.push_back({place.bytes, place.blocks});
    if (samples_.entries().size() == 1) place.first_largest = place.largest;
  }
  sample->workload = measure_workload();
  for (Place& place : places_) place.largest = 0;
}

// How much larger the requests are than in the first step: the median over all places that asked in both.
double GrowthSamples::measure_workload() const {
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

PlaceLevel GrowthSamples::level(const Sample& sample, size_t place) {
  return place < sample.levels.size() ? sample.levels[place] : PlaceLevel{};
}

StepCurves GrowthSamples::finish(const Trace& trace, const NodeTable& nodes) const {
  const std::vector<Sample>& samples = samples_.entries();
  StepCurves curves;
  for (const Sample& sample : samples) {
    curves.steps.push_back(sample.step);
    curves.workload.push_back(sample.workload);
  }
  const Run run = choose_run(trace);
  curves.run_steps = run.earlier;
  for (const size_t sample : run.samples) curves.run_steps.push_back(samples[sample].step);
  const auto made_after = earlier_.made_after(run.earlier, run.earlier.empty() ? 0 : samples.front().step);

  for (size_t p = 0; p < places_.size(); ++p) {
    PlaceCurve curve;
    const auto add = [](PlaceLevel level, std::vector<int64_t>& bytes, std::vector<int64_t>& blocks) {
      bytes.push_back(level.bytes);
      blocks.push_back(level.blocks);
    };
    for (const Sample& sample : samples) add(level(sample, p), curve.bytes, curve.blocks);
    const auto made = made_after.find(static_cast<uint32_t>(p));
    for (size_t i = 0; i < run.earlier.size(); ++i) {
      PlaceLevel then = level(samples.front(), p);
      if (made != made_after.end()) {
        then.bytes -= made->second[i].bytes;
        then.blocks -= made->second[i].blocks;
      }
      add(then, curve.run_bytes, curve.run_blocks);
    }
    for (const size_t sample : run.samples) add(level(samples[sample], p), curve.run_bytes, curve.run_blocks);
    if (!ends_higher(curve.bytes) && !ends_higher(curve.run_bytes)) continue;
    const Event& newest = places_[p].newest;
    curve.where = locate(trace, nodes, newest);
    curve.context = newest.context;
    const bool is_recorded = (trace.context(newest.context).flags & kGradMode) != 0;
    curve.in_graph = is_recorded && !in_node(newest);
    curve.differentiated = is_recorded && in_node(newest);
    curve.newest = newest.sequence;
    curves.places.push_back(std::move(curve));
  }
  return curves;
}

// Before the trace's events as far apart as samples of the whole run would be, and later the samples that are so, too.
GrowthSamples::Run GrowthSamples::choose_run(const Trace& trace) const {
  const uint32_t first = trace.process.steps_before + 1;
  const std::vector<Sample>& samples = samples_.entries();
  const bool begins_later = trace.overwritten_events > 0 && !trace.step_ends.empty() && !samples.empty();
  if (!begins_later || samples.front().step <= first) return {};
  Run run;
  size_t sample = 0;
  for (const uint32_t step : spread_steps(first, samples.back().step)) {
    if (step < samples.front().step) {
      run.earlier.push_back(step);
      continue;
    }
    while (sample + 1 < samples.size() && samples[sample + 1].step <= step) ++sample;
    if (run.samples.empty() || run.samples.back() != sample) run.samples.push_back(sample);
  }
  return run;
}

}  // namespace oomdiag
