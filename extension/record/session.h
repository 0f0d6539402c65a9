#pragma once

#include <atomic>
#include <filesystem>
#include <memory>

#include "extension/record/learned_step.h"
#include "extension/record/scope_names.h"
#include "extension/record/step_counter.h"
#include "extension/record/thread_numbers.h"
#include "profiler/trace/format.h"
#include "profiler/trace/writer.h"

namespace oomdiag {

/// The recording of this process. There is at most one, it is made when the caching allocator is ready and never destroyed:
/// threads may free memory until the very end of the process.
class Session {
 public:
  Session(std::unique_ptr<TraceWriter> writer, std::filesystem::path trace)
      : writer_(std::move(writer)), steps_(*writer_), trace_(std::move(trace)) {}

  TraceWriter& writer() { return *writer_; }
  StepCounter& steps() { return steps_; }
  NumberedNames& scope_names() { return scope_names_; }
  /// What a path of scopes or a mark is recorded as: programs number them (scope_names.h). Counts those that lose their number.
  std::string_view canonical_name(std::string_view name);
  const std::filesystem::path& trace() const { return trace_; }
  StepLearner& learner() { return learner_; }
  ThreadNumbers& thread_numbers() { return thread_numbers_; }
  /// A new number for a call of an outermost op. Any thread.
  uint32_t next_call_id() noexcept { return call_ids_.fetch_add(1, std::memory_order_relaxed) + 1; }
  /// The last one that was taken.
  std::atomic<uint32_t>& call_ids() noexcept { return call_ids_; }

  /// Requested bytes of the live blocks of each device. Written under that device's lock only, so a plain addition will do.
  std::atomic<int64_t> live_bytes_of[kMaxDevices] = {};
  void add_live_bytes(uint8_t device, int64_t bytes) noexcept {
    std::atomic<int64_t>& live = live_bytes_of[device % kMaxDevices];
    live.store(live.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  }
  /// Of all devices.
  int64_t live_bytes() const noexcept {
    int64_t sum = 0;
    for (uint32_t d = 0; d < device_count; ++d) sum += live_bytes_of[d].load(std::memory_order_relaxed);
    return sum;
  }
  uint32_t device_count = 1;
  /// Whether a GPU is filling up, so that an OOM in forward may come and the newest outputs are worth their price.
  bool near_the_limit() const noexcept {
    for (uint32_t d = 0; d < device_count; ++d) {
      if (live_bytes_of[d].load(std::memory_order_relaxed) > watch_outputs_above[d]) return true;
    }
    return false;
  }
  /// Whether half of the trace was overwritten since `written_at`: what was written then may be gone soon.
  bool fades(double written_at) const noexcept { return writer_->times_overwritten() > written_at + 0.5; }
  std::atomic<int64_t> highest_walked = 0;       ///< live_bytes at the largest graph walked so far
  std::atomic<int64_t> highest_when_judged = 0;  ///< highest_walked at the end of the step before
  std::atomic<uint32_t> backward_of_step = 0;    ///< in steady training: the newest step that reached its backward pass
  std::atomic<bool> walk_is_due = false;         ///< … and began it with clearly more alive than was ever walked
  std::atomic<int64_t> highest_grouped = 0;      ///< PyTorch's peak when parameter groups were last described
  std::atomic<double> walked_at = 0;             ///< times_overwritten() at the newest walk
  std::atomic<double> grouped_at = 0;            ///< likewise, when parameter groups were last described
  std::atomic<int> last_task = -1;               ///< newest graph task seen
  std::atomic<int> walks = 0;                    ///< graphs walked
  std::atomic<int> described_ooms = 0;           ///< OOMs described in full
  int64_t watch_outputs_above[kMaxDevices] = {};  ///< keep the newest outputs when more is live than this on a device

 private:
  std::unique_ptr<TraceWriter> writer_;
  StepCounter steps_;
  NumberedNames scope_names_;
  std::filesystem::path trace_;
  std::atomic<uint32_t> call_ids_ = 0;
  StepLearner learner_;
  ThreadNumbers thread_numbers_;
};

/// The session of this process, null before there is one. Written once.
extern Session* the_session;
/// Set while events are recorded: not before the allocator is ready, in a forked child, or while paused.
extern std::atomic<bool> is_recording;

/// Whether events are recorded now, and the trace can still take them.
inline bool recording() noexcept { return is_recording.load(std::memory_order_acquire) && the_session->writer().on(); }
/// The session; call only while `recording()`.
inline Session& session() noexcept { return *the_session; }

/// What a recording is asked for, from the environment or from the program itself.
struct RecordingOptions {
  std::filesystem::path folder;  ///< run folder: OOMDIAG_OUTPUT; empty = nobody wants a recording yet
  int attach_at_step = 1;        ///< OOMDIAG_ATTACH_AT_STEP: the optimizer step to begin with, from 1
};

/// Starts to record if that is requested, the caching allocator is initialised and nothing was tried before. Any
/// thread, at any time; cheap once it is done. A failure is said once on stderr, and the program goes on.
void poll() noexcept;
/// True when polling has nothing more to wait for: recording began, it waits for its step, or it failed for good.
bool settled() noexcept;
/// The step that was to be attached at has come: starts to record. `steps_before` optimizer steps are over.
void start_at_step(uint32_t steps_before) noexcept;

/// Starts to record into `folder` (made if need be; empty: the one that was asked for before, else ./oomdiag-<pid>), as soon
/// as CUDA is used, or goes on after a stop. Says where the trace goes. Does nothing while recording. Throws Error.
std::filesystem::path start_recording(const std::filesystem::path& folder);
/// Whether events are recorded, or will be as soon as CUDA is used. Any thread.
bool recording_is_wanted() noexcept;
/// Throws Error(usage) in a forked child (fork_and_exit.h).
void check_not_forked();
/// Nothing is recorded from here on.
void stop_recording() noexcept;
/// This copy of the library is one too many in its process: it never records.
void retire() noexcept;
/// Writes a note of this kind; does nothing while not recording.
void write_note(std::string_view kind, const char* name) noexcept;

}  // namespace oomdiag
