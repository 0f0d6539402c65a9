#pragma once

#include <chrono>
#include <csignal>
#include <initializer_list>

namespace oomdiag {

/// While it lives, these signals are not delivered but wait to be asked for.
class BlockedSignals {
 public:
  explicit BlockedSignals(std::initializer_list<int> signals) {
    sigemptyset(&set_);
    for (const int signal : signals) sigaddset(&set_, signal);
    sigprocmask(SIG_BLOCK, &set_, &before_);
  }
  ~BlockedSignals() { restore(); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  /// In a child that goes its own way, too.
  void restore() const { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  const sigset_t& set() const { return set_; }

  /// The next one, or a negative number where none comes in this time.
  int wait(std::chrono::nanoseconds time, siginfo_t& info) const {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
    const timespec limit{.tv_sec = seconds.count(), .tv_nsec = (time - seconds).count()};
    return sigtimedwait(&set_, &info, &limit);
  }

 private:
  sigset_t set_{}, before_{};
};

}  // namespace oomdiag
