#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/device/device.h"
#include "cli/experiments/executor.h"
#include "cli/launch/ranks.h"
#include "cli/launch/steady.h"
#include "cli/process/launcher.h"
#include "cli/process/temporary_folder.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/report/report.h"
#include "profiler/shape_function/allocation_sequence.h"

namespace oomdiag {

/// A run whose only purpose is its figures.
struct ExperimentRequest {
  std::vector<std::string> program;
  DeviceChoice device;
  Environment environment{};
  std::optional<SingleRank> rank{};
  bool is_metered = false;  ///< its report has the work of a step
  nlohmann::json fixes{};   ///< [id, settings] each; null = the program as it is
  SteadyRule steady{};
  std::optional<int64_t> batch{};
  int64_t judged_bytes = 0;
  bool keeps_allocations = false;  ///< the experiment has its sequence of allocations
  bool keeps_step = false;         ///< the experiment has its step
};

/// The run of one process that passed: its trace explained, with the allocations of its step.
struct RecordedStep {
  Explained run{};
  std::map<std::string, double> forward_ns{};  ///< modelled, by module; empty where the run was not metered
};

/// What came of it. All figures are measured.
struct Experiment {
  std::string outcome = "failed";  ///< as in a report
  int exit_code = 0;
  std::string why{};    ///< it neither passed nor ran out of memory: what it said last, or what stood in the way
  std::string place{};  ///< where it ran out of memory: "backward, step 2"
  int64_t allocated_bytes = 0, reserved_bytes = 0, non_pytorch_bytes = 0, total_bytes = 0;
  double memory_fraction = 1;              ///< of the GPU that PyTorch may reserve
  int64_t needed_bytes = 0;                ///< as the function of that name says
  uint32_t stopped_at_step = 0;            ///< 0 = it ended by itself
  uint32_t failed_at_step = 0;             ///< step_to_reach() of its report
  int64_t growth_bytes = 0;                ///< what more lived at the end of each step
  double seconds = 0;                      ///< of wall time, that of reading its trace included
  std::vector<nlohmann::json> reported{};  ///< what the fixes said, see extension/python/fixes
  std::optional<Report> report{};
  std::optional<AllocationSequence> allocations{};  ///< where it was asked for and the run passed
  std::shared_ptr<const RecordedStep> step{};       ///< likewise; null where it had several processes

  /// What PyTorch could take of a GPU of this size.
  int64_t available_bytes(int64_t gpu_bytes) const {
    return oomdiag::available_bytes(gpu_bytes, non_pytorch_bytes, memory_fraction);
  }
  bool passed() const { return outcome == "ok"; }
  bool ran_out() const { return outcome == "out_of_memory" || outcome == "caught"; }
};

/// What a run on this GPU reserved at most; where it ran out what was reserved, with the request.
int64_t needed_bytes(const ReportOfDevice& device);
/// Where it ran out of memory, or most of it was in host memory: "backward, step 2"; empty where neither was.
std::string place_of_failure(const ReportOfDevice& device);

/// Makes experiments with an Executor. Nothing is left of them.
class Experiments {
 public:
  explicit Experiments(const Install& install) : install_(install), executor_(install) {}

  /// Their results, in their order. `on_done` is called with the number of all experiments that are over, whenever one
  /// ends. Throws Error if one cannot be started; Interrupted, and then finished() has what was over.
  std::vector<Experiment> run(const std::vector<ExperimentRequest>& requests,
                              const std::function<void(std::size_t)>& on_done);
  Experiment run(const ExperimentRequest& request, const std::function<void(std::size_t)>& on_done);

  /// What came of each request of the call that was interrupted; nullopt where it did not end.
  const std::vector<std::optional<Experiment>>& finished() const { return finished_; }
  std::size_t count() const { return executor_.count(); }
  const Install& install() const { return install_; }
  /// From now on each run is given what our stdin has, where that is a file or a pipe; else, and before, an empty one. Says so on
  /// stderr where it is not all of it.
  void keep_stdin();
  /// As of an Executor.
  void never_fork() { executor_.never_fork(); }

 private:
  const Install& install_;
  Executor executor_;
  TemporaryFolder folder_;
  std::filesystem::path input_{};  ///< what stdin had
  std::vector<std::optional<Experiment>> finished_{};
};

}  // namespace oomdiag
