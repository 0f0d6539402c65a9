#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <initializer_list>

namespace oomdiag {

sigset_t make_signals(std::initializer_list<int> numbers);

/// All signals that another process may send us and mean the program: not those that a write of our own raises, nor those
/// that stop and continue a job, which are left to act. A fault of ours ends us all the same, though its signal is blocked.
sigset_t passed_signals();

/// While it lives, these signals are not delivered but wait to be asked for.
class BlockedSignals {
 public:
  explicit BlockedSignals(const sigset_t& signals) : set_(signals) { sigprocmask(SIG_BLOCK, &set_, &before_); }
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
  sigset_t set_, before_{};
};

/// A process of our process group that does nothing but wait for `passed_signals`. What reaches it was sent to the whole
/// group, as `kill -- -PGID`, Slurm and systemd do it, and has reached the program without us: passed on, it would come
/// there twice. Where it cannot be started it has received nothing.
class GroupWitness {
 public:
  /// To be called while `passed_signals` are blocked.
  GroupWitness();
  ~GroupWitness();
  GroupWitness(const GroupWitness&) = delete;
  GroupWitness& operator=(const GroupWitness&) = delete;

  /// Whether it has received this signal, which is then forgotten. Waits some milliseconds: who signals each process of a
  /// group by itself may have begun with us.
  bool received(int signal);

 private:
  bool ask(int signal);

  pid_t pid_ = -1;
  int socket_ = -1;
};

}  // namespace oomdiag
