#pragma once

#include <cstdint>
#include <map>

#include "profiler/event.h"
#include "profiler/trace/trace.h"

// Steps of a program that does not train: inference, generate(), a server. One iteration is one of
//   a scope      that the program opens again and again at the outermost level, if nearly all of its work lies in it
//   a call       of its outermost module, in Python. Nothing shows it but the ops inside: it begins with the op that was
//                the first in a module, when that runs again. In most programs something is made outside of modules
//                between two calls (the next batch, the token that was chosen); then only such a return counts, and not
//                that a layer is called several times inside of one call; nor where most of all work follows the last one.
namespace oomdiag {

/// How the iterations of a program are recognised; one that trains has none.
struct IterationRule {
  static constexpr uint64_t kNever = ~uint64_t{0};

  uint64_t first = kNever;     ///< index of the event that begins the first one
  uint32_t scope = 0;          ///< name of the scope
  uint32_t context = 0;        ///< without one: of the op that begins a call; 0: there are no iterations
  bool after_outside = false;  ///< … if something was made outside of modules before

  bool is_known() const { return scope != 0 || context != 0; }
};

/// Finds the rule in one pass over a trace.
class IterationFinder {
 public:
  explicit IterationFinder(const Trace& trace) : trace_(trace) {}

  /// Takes the next event.
  void read(const Event& event, uint64_t index);
  /// `trains`: there is a backward pass, or an optimizer.
  IterationRule finish(bool trains) const;

 private:
  struct Scope {
    uint64_t first = 0, calls = 0, ops = 0;
  };
  void read_alloc(const Event& event, uint64_t index);

  const Trace& trace_;
  std::map<uint32_t, Scope> scopes_;      ///< of the outermost level, by name
  std::map<uint16_t, uint32_t> depths_;   ///< by thread
  std::map<uint16_t, uint32_t> current_;  ///< likewise: the outermost scope
  IterationRule call_{};
  uint32_t call_id_ = 0;  ///< of the newest op
  uint64_t ops_ = 0;      ///< in modules
  uint64_t returns_ = 0, returns_after_outside_ = 0;
  uint64_t ops_before_return_ = 0;  ///< of ops_, before the newest return
  bool outside_ = false, graph_ = false;
};

/// Follows a trace by the rule.
class IterationFollower {
 public:
  explicit IterationFollower(const IterationRule& rule) : rule_(rule) {}

  /// Takes the next event. True: it begins an iteration.
  bool begins(const Event& event, bool in_module) {
    if (event.kind == EventKind::scope_begin) return rule_.scope != 0 && event.detail == rule_.scope;
    if (event.kind != EventKind::alloc || event.call_id == 0 || rule_.scope != 0 || rule_.context == 0) return false;
    const bool returned = event.context == rule_.context && event.call_id != call_id_;
    const bool counts = returned && (outside_ || !rule_.after_outside);
    outside_ = !in_module;
    call_id_ = event.call_id;
    return counts;
  }

 private:
  IterationRule rule_;
  uint32_t call_id_ = 0;
  bool outside_ = true;
};

}  // namespace oomdiag
