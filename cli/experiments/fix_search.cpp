#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "cli/device/device.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fix.h"
#include "cli/experiments/fix_runs.h"
#include "cli/process/workers.h"
#include "cli/terminal/sizes.h"

// The program as it is, once on the GPU and once with ample memory; then each change alone; then, where none is enough,
// changes together. A change that is expected to fit is run on the GPU: if it passes there, that is the proof and the
// figure. One that is not is run with ample memory, for the figure; if that turns out to fit, it is proved on the GPU
// after all.

namespace oomdiag {
namespace {

constexpr std::size_t kMaxTogether = 8;

class Search {
 public:
  Search(const Target& target, Experiments& experiments, const std::function<void(std::size_t, std::size_t)>& on_done)
      : runs_(target, experiments, on_done) {}

  Fixed run();

 private:
  using Place = FixRuns::Place;

  void measure(const std::vector<std::vector<Change>>& candidates);
  void run_and_take(const std::vector<std::size_t>& which, const std::vector<Place>& places);
  void search();
  void use_fewer_checkpoints();
  bool any_fits() const;

  FixRuns runs_;
  std::vector<MeasuredFix> fixes_;
};

/// Runs these of fixes_, each at its place.
void Search::run_and_take(const std::vector<std::size_t>& which, const std::vector<Place>& places) {
  std::vector<ExperimentRequest> requests;
  for (std::size_t i = 0; i < which.size(); ++i) requests.push_back(runs_.request(fixes_[which[i]].changes, places[i]));
  std::vector<bool> is_over(which.size());
  try {
    runs_.make(requests, [&](std::size_t i, const Experiment& experiment) {
      runs_.take(fixes_[which[i]], experiment, places[i] == Place::gpu);
      is_over[i] = true;
    });
  } catch (const Interrupted&) {
    for (std::size_t i = 0; i < which.size(); ++i) {
      MeasuredFix& fix = fixes_[which[i]];
      if (is_over[i] || !fix.unproved.empty()) continue;
      fix.unproved = fix.measured_peak_bytes
                         ? fmt::format("{} GiB with more memory; it was not run on the device itself",
                                       to_gib(*fix.measured_peak_bytes))
                         : "it ran out of memory; it was not run with more memory";
    }
    throw;
  }
}

/// Runs each where it is expected to pass first, and once more where that was wrong.
void Search::measure(const std::vector<std::vector<Change>>& candidates) {
  std::vector<std::size_t> which, again;
  std::vector<Place> places, places_again;
  for (const std::vector<Change>& changes : candidates) {
    const auto& predicted = changes.front().predicted_peak_bytes;
    const bool should_fit = changes.size() > 1 || changes.front().cures ||
                            changes.front().id == "expandable_segments" ||
                            (predicted && *predicted < runs_.before().available_bytes);
    places.push_back(should_fit ? Place::gpu : Place::with_ample_memory);
    which.push_back(fixes_.size());
    fixes_.push_back({.changes = changes, .unproved = "it was not run"});
  }
  run_and_take(which, places);
  for (std::size_t i = 0; i < which.size(); ++i) {
    const MeasuredFix& fix = fixes_[which[i]];
    const bool on_gpu = places[i] == Place::gpu;
    const bool wants_figure = on_gpu && fix.unproved.empty() && !fix.measured_peak_bytes;
    const bool wants_proof =
        !on_gpu && fix.measured_peak_bytes.value_or(kMaxGpuBytes) <= runs_.before().available_bytes;
    if (!wants_figure && !wants_proof) continue;
    again.push_back(which[i]);
    places_again.push_back(on_gpu ? Place::with_ample_memory : Place::gpu);
  }
  run_and_take(again, places_again);
}

// Checkpoints of all blocks were measured; most programs need fewer. The fewest that should do, by what was reserved, are tried
// along with one less; if both fail, two between them and all.
void Search::use_fewer_checkpoints() {
  const auto all = std::find_if(fixes_.begin(), fixes_.end(), [](const MeasuredFix& one) {
    return one.changes.size() == 1 && one.changes.front().id == "checkpoint";
  });
  if (all == fixes_.end() || !all->helps() || runs_.profile().blocks.empty()) return;
  const int64_t reserved = *all->measured_reserved_bytes;
  std::size_t enough = runs_.profile().blocks.size(), too_few = 0;
  std::size_t guess =
      fewest_checkpoints(runs_.profile(), runs_.before().reserved_bytes, reserved, runs_.before().available_bytes);
  bool found = false;  // and then it is the last of fixes_
  for (int rounds = 0; rounds < 2 && too_few + 1 < enough; ++rounds) {
    guess = std::clamp(guess, too_few + 1, enough - 1);
    std::vector<std::size_t> counts = {guess};
    if (guess - 1 > too_few) counts.insert(counts.begin(), guess - 1);
    std::vector<ExperimentRequest> requests;
    for (const std::size_t count : counts)
      requests.push_back(runs_.request({checkpoint_blocks(runs_.profile(), count)}, Place::gpu));
    runs_.make(requests, [&](std::size_t i, const Experiment& experiment) {
      if (counts[i] >= enough) return;
      MeasuredFix fix{.changes = {checkpoint_blocks(runs_.profile(), counts[i])}};
      runs_.take(fix, experiment, /*on_gpu=*/true);
      if (!fix.fits) {
        too_few = counts[i];
        return;
      }
      enough = counts[i];
      if (std::exchange(found, true)) fixes_.pop_back();
      fixes_.push_back(std::move(fix));
    });
    guess = found ? enough - 1 : (too_few + enough + 1) / 2;
  }
}

bool Search::any_fits() const {
  return std::any_of(fixes_.begin(), fixes_.end(), [](const MeasuredFix& one) { return one.helps(); });
}

void Search::search() {
  std::vector<std::vector<Change>> singles;
  for (const Change& change : list_changes(runs_.target(), runs_.profile(), runs_.whole(), runs_.before())) {
    const std::string why = why_not_run(change, runs_.before());
    if (why.empty()) {
      singles.push_back({change});
    } else {
      fixes_.push_back({.changes = {change}, .unproved = why});
    }
  }
  measure(singles);
  use_fewer_checkpoints();
  if (any_fits() || runs_.before().grows) return;
  auto together = combine(fixes_, runs_.before());
  if (together.size() > kMaxTogether) together.resize(kMaxTogether);
  for (std::size_t i = 0; i < together.size() && !any_fits(); i += 2) {
    const auto last = std::min(together.size(), i + 2);
    measure({together.begin() + static_cast<std::ptrdiff_t>(i), together.begin() + static_cast<std::ptrdiff_t>(last)});
  }
}

Fixed Search::run() {
  const auto begin = std::chrono::steady_clock::now();
  int interrupted_by = 0;
  runs_.profile_the_complete_run();
  try {
    if (runs_.before().outcome != "ok") search();
  } catch (const Interrupted& interrupted) {
    interrupted_by = interrupted.signal;
  }
  sort_fixes(fixes_, runs_.before(), runs_.target().batch);
  for (MeasuredFix& fix : list_not_run(runs_.offered(), fixes_, runs_.before())) fixes_.push_back(std::move(fix));
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  return {.before = runs_.before(),
          .fixes = fixes_,
          .runs = runs_.experiments().count(),
          .seconds = time.count(),
          .interrupted_by = interrupted_by,
          .whole = runs_.complete_run_of_failed()};
}

}  // namespace

Fixed search_fix(const Target& target, Experiments& experiments,
                 const std::function<void(std::size_t, std::size_t)>& on_done) {
  return Search(target, experiments, on_done).run();
}

}  // namespace oomdiag
