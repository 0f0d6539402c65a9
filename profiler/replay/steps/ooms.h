#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Whether an op there retries with less workspace when its request fails. ATen/native/cudnn/Conv_v7.cpp and
/// Conv_v8.cpp catch OutOfMemoryError, to try the next plan; no other op does.
bool retries_with_less(const Trace& trace, const Context& context);

/// Decides how each OOM of a trace ended. The failed request alone says nothing: PyTorch's convolutions catch their
/// own, and so do libraries that ask the driver. No other op does.
///   op_failed of the same op follows              an exception left the op: caught by the program, or fatal
///   the thread allocates again, and no op_failed  recovered inside the op, where that can be; else caught or fatal too
///   forward ops or optimizer steps follow later   the program caught it and went on; without gradients, where its thread
///                                                 runs ops in modules again that make more than a kTrifle-th of what
///                                                 failed, or kManyAllocs others
/// What the op went on with is its next block, if that is scratch: freed before the op allocates again, or ends.
class OomReader {
 public:
  explicit OomReader(const Trace& trace) : trace_(&trace) {}
  /// Whether the next event is to be read, if it is no OOM itself: one before it waits for what follows.
  bool follows() const { return !open_.empty() || !retries_.empty(); }
  /// Takes the next event of the trace.
  void read(const Event& event, uint64_t index);
  /// Says that training goes on in this op call.
  void note_progress(uint32_t call_id);
  /// An alloc event, outside of backward; `in_module`: of an op in a module.
  void note_work(const Event& alloc, bool in_module);
  /// All OOMs, in order. `survived` overrides the guess, see prescan_trace.
  std::vector<OutOfMemory> finish(std::optional<bool> survived);

 private:
  /// What an op does after an OOM.
  struct Retry {
    uint32_t call_id = 0;
    uint32_t context = 0;  ///< who asks: an op inside of it may allocate, too
    size_t first = 0;      ///< of ooms_: those from here on were this op's
    uint64_t address = 0;
    int64_t bytes = 0;
  };
  /// What died unwinds and tidies up; what makes as much again went on.
  static constexpr uint32_t kManyAllocs = 64;
  static constexpr int64_t kTrifle = 1024;
  struct Unwound {
    size_t oom = 0;
    uint16_t thread = 0;
    uint32_t allocs = 0;  ///< of its thread since
  };
  void follow(const Event& event);
  bool can_be_recovered(const Event& oom) const;
  /// How the open OOM of `thread` ends if no exception was seen to leave its op.
  Outcome outcome_without_failure(size_t at) const { return recoverable_[at] ? Outcome::recovered : Outcome::fatal; }
  void resolve(uint16_t thread, Outcome outcome);

  const Trace* trace_;
  std::vector<OutOfMemory> ooms_;
  std::vector<uint32_t> call_ids_;     ///< the op call of each
  std::vector<bool> recoverable_;      ///< of each, whether what asked may have gone on without
  std::map<uint16_t, size_t> open_;    ///< by thread: the OOM whose end is not known yet
  std::map<uint16_t, Retry> retries_;  ///< by thread
  std::vector<Unwound> unwound_;       ///< left their op, and nothing went on since
};

}  // namespace oomdiag
