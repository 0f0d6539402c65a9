#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>

#include "profiler/trace/writer.h"

namespace oomdiag {

/// Counts the steps of the training loop as they pass and lists them in the trace: the events that record them may be
/// overwritten one day. A step ends with an optimizer's step; in a loop without PyTorch's optimizers it ends where the next
/// forward pass begins after a backward pass. Any thread; not for the allocator.
class StepCounter {
 public:
  explicit StepCounter(TraceWriter& writer) : writer_(writer) {}

  /// A node of a backward pass begins to run.
  void note_backward() noexcept {
    if (!backward_ran_.load(std::memory_order_relaxed)) backward_ran_.store(true, std::memory_order_relaxed);
  }
  /// An outermost op begins that may be the first one of a step.
  void note_op() noexcept {
    if (!by_optimizer_ && backward_ran_.load(std::memory_order_relaxed)) [[unlikely]]
      op_begins_after_.store(events(), std::memory_order_relaxed);
  }
  /// An op of a forward pass made autograd nodes. `live_bytes()` is asked where a step ends.
  template <class LiveBytes>
  void note_forward(LiveBytes live_bytes) noexcept {
    if (!backward_ran_.load(std::memory_order_relaxed)) [[likely]]
      return;
    if (!backward_ran_.exchange(false) || by_optimizer_) return;
    note_end(live_bytes());
    writer_.end_step(op_begins_after_.load(std::memory_order_relaxed));
  }
  /// An optimizer's step ended.
  void note_optimizer_step(int64_t live_bytes) noexcept {
    if (!by_optimizer_.exchange(true)) writer_.count_steps_by_optimizer();
    note_end(live_bytes);
    writer_.end_step(events());
  }
  /// Whether a node of autograd was made by the step that runs, or the one before; false also where that is not known.
  bool is_of_newest_steps(uint64_t sequence, uint64_t thread) const noexcept {
    const uint64_t first = first_of_newest_.load(std::memory_order_relaxed);
    return first > 0 && sequence >= first && thread == thread_.load(std::memory_order_relaxed);
  }
  /// Whether step after step more was alive than ever before: perhaps a leak.
  bool may_grow() const noexcept { return new_levels_.load(std::memory_order_relaxed) >= kLevelsOfGrowth; }

 private:
  static constexpr int kLevelsOfGrowth = 4;  // the first two steps make gradients and optimizer state

  // Nodes are numbered by the thread that makes them: the one whose steps these are.
  void note_nodes() noexcept {
    const uint64_t next = at::sequence_number::peek();
    first_of_newest_.store(next_after_step_.exchange(next), std::memory_order_relaxed);
    thread_.store(at::RecordFunction::currentThreadId(), std::memory_order_relaxed);
  }
  void note_end(int64_t live_bytes) noexcept {
    note_nodes();
    if (live_bytes <= highest_level_.load(std::memory_order_relaxed)) return;
    highest_level_.store(live_bytes, std::memory_order_relaxed);
    new_levels_.fetch_add(1, std::memory_order_relaxed);
  }
  uint64_t events() const noexcept { return writer_.header().last_sequence.load(std::memory_order_relaxed); }

  TraceWriter& writer_;
  std::atomic<bool> backward_ran_ = false;
  std::atomic<bool> by_optimizer_ = false;
  std::atomic<uint64_t> op_begins_after_ = 0;
  std::atomic<uint64_t> next_after_step_ = 0;  ///< number of the first node after the newest step that has ended
  std::atomic<uint64_t> first_of_newest_ = 0;  ///< the same of the step before; 0: none has ended
  std::atomic<uint64_t> thread_ = 0;
  std::atomic<int64_t> highest_level_ = 0;  ///< most live bytes at the end of a step
  std::atomic<int> new_levels_ = 0;         ///< how often it rose
};

}  // namespace oomdiag
