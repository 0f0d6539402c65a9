#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "profiler/trace/follower.h"

namespace oomdiag {

/// When a run has shown what it needs.
struct SteadyRule {
  uint32_t steps =
      0;  ///< after so many steps; 0 = found: a step and then as many again, three at least, without a new peak
  uint32_t at_least = 0;  ///< steps that must be over in any case
  uint32_t most = 0;      ///< enough in any case, as for a program that grows without end; 0 = no such bound
  std::chrono::seconds without_steps{30};  ///< a program that makes no steps: so long without a new peak
  bool to_end = false;                     ///< only the program's own end is enough
  std::chrono::seconds longest{0};         ///< enough in any case; 0 = no such bound

  bool operator==(const SteadyRule&) const = default;
};

/// Steps after which a run with ample memory is ended though its peak still rises: it grows without end.
inline constexpr uint32_t kMaxSteps = 200;

/// Of a run with ample memory that is to show all that a run did until the end of `step`.
constexpr SteadyRule until_step(uint32_t step) {
  return {.at_least = step, .most = step < kMaxSteps ? kMaxSteps : step + 1};
}

/// What was seen of a run so far.
struct SteadyState {
  uint32_t step = 0;       ///< that runs
  uint32_t peak_step = 0;  ///< in which the peak last rose
  std::chrono::steady_clock::duration since_start{}, since_peak{};
};

/// Whether a run in this state has shown what it needs. The peak of a run rises in its first steps, when gradients, the
/// optimizer's state and workspaces come; one that has not risen for as many steps as it took to reach it is steady.
bool is_steady(const SteadyState& state, const SteadyRule& rule);

/// Follows a program that runs by its trace, and says when it is enough.
class SteadyWatch {
 public:
  explicit SteadyWatch(SteadyRule rule);
  ~SteadyWatch();
  SteadyWatch(const SteadyWatch&) = delete;
  SteadyWatch& operator=(const SteadyWatch&) = delete;

  void look(const std::filesystem::path& run_folder);
  bool is_over() const { return is_over_; }
  uint32_t step() const { return state_.step; }

 private:
  SteadyRule rule_;
  SteadyState state_;
  bool is_over_ = false;
  int64_t peak_bytes_ = 0, reserved_bytes_ = 0;
  std::chrono::steady_clock::time_point start_, last_rise_;
  std::unique_ptr<TraceFollower> follower_;
};

}  // namespace oomdiag
