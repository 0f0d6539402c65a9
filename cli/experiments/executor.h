#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/experiments/forking_python.h"
#include "cli/launch/diagnosis.h"
#include "cli/python/install.h"

namespace oomdiag {

/// A diagnosis that was made in a process of its own.
struct Executed {
  std::filesystem::path folder{};  ///< of the run, with all that it left; empty if that process died
  int exit_code = 0;               ///< of the program
  uint32_t stopped_at_step = 0;    ///< as of a Diagnosis
  std::string why_no_report{};     ///< one line, where there is no report.json in the folder
  std::vector<int> stages{};       ///< as of a Diagnosis
  double seconds = 0;              ///< of wall time, that of reading its trace included

  bool has_report() const { return why_no_report.empty(); }
};

/// Runs programs whose figures are needed, each in a process of its own: as many at once as cores and memory of this
/// host allow, of its cgroup too; one at a time on a real GPU. A program that PyTorch aborted at its exit is run once
/// more. All that runs many programs does it here. Those of a Python script are forked from a process that has made its
/// imports.
class Executor {
 public:
  explicit Executor(const Install& install) : install_(install) {}

  /// Their results, in their order. `on_done` is called with the number of all runs that are over, whenever one ends.
  /// Throws Error if one cannot be started; Interrupted, and then finished() has what was over.
  std::vector<Executed> run(const std::vector<DiagnosisRequest>& requests,
                            const std::function<void(std::size_t)>& on_done);

  /// From now on each program is started anew.
  void never_fork() { forks_ = false; }

  /// What came of each request of the last call; nullopt where it did not end.
  const std::vector<std::optional<Executed>>& finished() const { return finished_; }
  /// All runs so far.
  std::size_t count() const { return count_; }

 private:
  void run_once(const std::vector<DiagnosisRequest>& requests, const std::vector<std::size_t>& which,
                const std::function<void(std::size_t)>& on_done);
  /// The request, to be forked where that can be.
  DiagnosisRequest with_fork(DiagnosisRequest request) const;
  /// One process for many runs, where they are many.
  void start_forking(const std::vector<DiagnosisRequest>& requests);

  const Install& install_;
  bool forks_ = true;
  std::vector<std::unique_ptr<ForkingPython>> forking_{};
  std::vector<std::optional<Executed>> finished_{};
  std::size_t count_ = 0;
};

}  // namespace oomdiag
