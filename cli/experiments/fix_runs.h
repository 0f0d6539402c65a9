#pragma once

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
      : target_(target), experiments_(experiments), on_done_(on_done) {}

  /// Runs the program as it is, on the GPU and with ample memory: before(), profile() and whole(). `keeps_step`: of the
  /// complete run the allocations of its step, too. Throws Error(environment) if it fails for another reason than
  /// memory.
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
  /// The report on the complete run, if there is one and the program runs out on the GPU.
  std::optional<Report> complete_run_of_failed() const {
    const bool is_complete = before_.is_whole && before_.outcome == "out_of_memory";
    return is_complete ? whole_.report : std::nullopt;
  }

 private:
  std::optional<std::vector<std::string>> lines_of_framework(const MeasuredFix& fix) const;
  std::string why_unproved(const MeasuredFix& fix, const Experiment& experiment) const;

  const Target& target_;
  Experiments& experiments_;
  const OnDone& on_done_;
  Before before_;
  ProgramProfile profile_;
  Experiment whole_;
};

}  // namespace oomdiag
