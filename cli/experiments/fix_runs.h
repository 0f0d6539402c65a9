#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/experiments/experiment.h"
#include "cli/experiments/fix.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// Runs a program with changes, and takes what each run shows. What `fix` searches by.
class FixRuns {
 public:
  using OnDone = std::function<void(std::size_t over, std::size_t all)>;
  enum class Place { gpu, with_ample_memory };

  FixRuns(const Target& target, Experiments& experiments, const OnDone& on_done)
      : target_(target),
        experiments_(experiments),
        on_done_(on_done),
        step_(target.recorded ? target.recorded->step : 0) {}

  /// Runs the program as it is, on the GPU and with ample memory: before(), profile() and whole(). `keeps_step`: of the
  /// complete run the allocations of its step, too. Throws Error(environment) if it fails for another reason than
  /// memory, or does not run out as it did when it was recorded.
  void profile_the_complete_run(bool keeps_step = false);

  ExperimentRequest request(const std::vector<Change>& changes, Place place) const;
  /// Gives each result to `take`, with its place among the requests. Throws Interrupted after those that were over.
  void make(const std::vector<ExperimentRequest>& requests,
            const std::function<void(std::size_t, const Experiment&)>& take);
  /// Takes what a run of `fix` showed; of a run on the GPU whether it fits.
  void take(MeasuredFix& fix, const Experiment& experiment, bool on_gpu) const;

  const Target& target() const { return target_; }
  Experiments& experiments() { return experiments_; }
  const Before& before() const { return before_; }
  const ProgramProfile& profile() const { return profile_; }
  /// The report on the complete run; where there is none that on the run on the GPU.
  const Report& whole() const { return *whole_.report; }
  const Experiment& whole_run() const { return whole_; }
  /// The fixes that the report on the failure names, and that on the complete run.
  const std::vector<Fix>& offered() const { return offered_; }
  /// The report on the complete run, if there is one and the program runs out on the GPU.
  std::optional<Report> complete_run_of_failed() const {
    const bool is_complete = before_.is_whole && before_.outcome == "out_of_memory";
    return is_complete ? whole_.report : std::nullopt;
  }

 private:
  void require_same_failure(const Experiment& first) const;
  void take_before(const Experiment& first, const Experiment& whole);
  std::optional<std::vector<std::string>> lines_of_framework(const MeasuredFix& fix) const;
  std::string why_unproved(const MeasuredFix& fix, const Experiment& experiment) const;

  const Target& target_;
  Experiments& experiments_;
  const OnDone& on_done_;
  Before before_;
  ProgramProfile profile_;
  uint32_t step_ = 0;             ///< that each run has to be through before a steady peak may end it
  std::chrono::seconds time_{0};  ///< likewise, of a program that makes no steps: so long without a new peak
  Experiment whole_;
  std::vector<Fix> offered_;
};

}  // namespace oomdiag
