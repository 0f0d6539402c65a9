#include "cli/launch/steady.h"

#include <algorithm>

#include "cli/reports/run_folder.h"
#include "profiler/trace/follower.h"

namespace oomdiag {

bool is_steady(const SteadyState& state, const SteadyRule& rule) {
  if (state.step == 0) return false;
  if (rule.longest.count() > 0 && state.since_start >= rule.longest) return true;
  if (rule.to_end) return false;
  const uint32_t over = state.step - 1;
  if (rule.most > 0 && over >= rule.most) return true;
  if (over < rule.at_least) return false;
  if (rule.steps > 0) return over >= rule.steps;
  if (over == 0) {
    return state.since_peak >= std::max<std::chrono::steady_clock::duration>(
                                   rule.without_steps, 2 * (state.since_start - state.since_peak));
  }
  return over >= state.peak_step + std::max<uint32_t>(3, state.peak_step);
}

SteadyWatch::SteadyWatch(SteadyRule rule) : rule_(rule), start_(std::chrono::steady_clock::now()), last_rise_(start_) {}
SteadyWatch::~SteadyWatch() = default;

void SteadyWatch::look(const std::filesystem::path& run_folder) {
  if (follower_ == nullptr) follower_ = follow_run(run_folder);
  if (follower_ == nullptr || is_over_) return;
  const LiveFigures& figures = follower_->read_on();
  const auto now = std::chrono::steady_clock::now();
  state_.step = figures.step;
  if (figures.peak_allocated_bytes > peak_bytes_ || figures.reserved_bytes > reserved_bytes_) {
    peak_bytes_ = std::max(peak_bytes_, figures.peak_allocated_bytes);
    reserved_bytes_ = std::max(reserved_bytes_, figures.reserved_bytes);
    state_.peak_step = std::max<uint32_t>(1, figures.step);
    last_rise_ = now;
  }
  state_.since_start = now - start_;
  state_.since_peak = now - last_rise_;
  is_over_ = figures.ooms == 0 && is_steady(state_, rule_);
}

}  // namespace oomdiag
