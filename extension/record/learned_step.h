#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "profiler/event.h"

// Steady training. Steps repeat: once a step's allocations are those of the steps before, in the same order and at the same
// places, the op callbacks add nothing new. They are switched off then, and an allocation gets its place in the program
// from its place in the learned step. The first allocation that is not the expected one switches them on again.
//
//   learning ── two steps alike ──► recording ── once more ──► steady ── every 64th step ──► recording …
//      ▲                                └───────── not alike ─────┴──────────────────────┐
//      └─────────────────────────────────────────────────────────────────────────────────┘
//
// An event of a steady step is written whole, and not as "event n of script k" for the reader to look up: what the newest events
// say would hang on those of another step, which may be overwritten or lost. It would save nothing that can be measured: without
// any store, and without the notes below, steady steps of ResNet-50 and of the reference net are as slow as with them. What
// costs is to look where the thread is and to keep the table of live blocks, which names the place of each block in any case.
//
// A step ends with the end of the optimizer's step that ended the first one. Frees are not compared: their places matter to
// nobody, and the garbage collector moves them. User scopes are watched in steady training too; they are few.
//
// Who owns what. A script is written and read by the thread whose it is, and by no other, also not to clear it: scripts
// have the number of the recording that they are of, and one of an older recording is as good as none. The thread that ends
// a step reads of the others nothing but three atomic numbers. What is known of the steps so far is behind the lock.
//
// Nothing here knows PyTorch: what is needed of it comes as values.
namespace oomdiag {

enum class TrainingMode : uint8_t { learning, recording, steady };

/// What is the same each time a thread comes by a place in the program, and can be read in nanoseconds.
struct ThreadMark {
  uint64_t mark = 0;  ///< a hash of where the thread is: its Python frames, the type of the autograd node that runs
  uint64_t next_node = 0;  ///< the number that the thread's next autograd node will have
  uint64_t claimed = 0;    ///< nodes of the thread below this number have been written
};

/// What is expected at a place of the learned step, and what it is given then. Two of them are a cache line: a step of the
/// program comes between one look at them and the next.
struct Expected {
  uint64_t key = 0;   ///< a hash of all that must be alike: see key_of()
  uint64_t node = 0;  ///< the node that runs, counted from the step's begin; of a scope_begin its number in the scopes
  uint32_t context = 0;
  uint32_t call_id = 0;    ///< counted from the step's begin; 0 outside of any op
  uint32_t notes_end = 0;  ///< so many of the step's notes come before what is expected next
  uint16_t node_thread = 0;
};
static_assert(sizeof(Expected) == 32);

/// A scope of the learned step.
struct LearnedScope {
  Context context;  ///< inside of it
  uint32_t context_id = 0;
};

/// What one thread does in a step: its allocations and scopes, the autograd nodes that its ops made, the gradients that it
/// accumulated and the reads of what no host had written; and what it did in the learned one.
class StepOfThread {
 public:
  explicit StepOfThread(uint16_t thread) : thread_(thread) {}

 private:
  friend class StepLearner;
  static constexpr uint64_t kElsewhere = ~uint64_t{0};

  // Read by the thread that ends the step.
  std::atomic<uint64_t> progress_ = 0;  ///< the step that the rest speaks about << 32 | events so far
  std::atomic<uint64_t> hash_ = 0;      ///< of all of them
  std::atomic<uint64_t> learned_ = 0;   ///< the recording that the script is of << 32 | its events

  // Of this thread alone.
  const uint16_t thread_;
  uint64_t first_node_ = 0;  ///< the thread's nodes are counted from here in this step
  uint64_t nodes_ = 0;       ///< in steady training: the thread's next node number at its last allocation
  uint32_t next_ = 0;        ///< in steady training: of `script_`
  uint32_t next_note_ = 0;   ///< … of `notes_`
  uint32_t notes_due_ = 0;   ///< … so many of them come before what is expected next

  // The learned step.
  std::vector<Expected> script_;
  std::vector<uint64_t> blocks_;  ///< for each of `script_`: the newest block there (block_key), 0 where it is no alloc
  /// The nodes_created and gradients. Numbers of nodes, that in the address too, and of op calls are counted from the step's
  /// begin; the address of a gradient is the place of its alloc in `script_`, or kElsewhere.
  std::vector<Event> notes_;
  uint32_t first_notes_ = 0;  ///< so many of them come before all of `script_`
  std::vector<LearnedScope> scopes_;
  std::unordered_map<uint64_t, size_t> newest_;  ///< allocs of the script that is recorded, by block_key
  size_t looked_at_ = 0;                         ///< of `blocks_` are in `newest_`
};

/// All threads of the process, and the steps that they do together.
class StepLearner {
 public:
  TrainingMode mode() const noexcept { return mode_.load(std::memory_order_relaxed); }
  bool steady() const noexcept { return mode() == TrainingMode::steady; }
  /// Forgets what was learned. `enable` = false: never steady, and nothing need be learned.
  void restart(bool enable) noexcept;
  bool is_enabled() const noexcept { return is_enabled_.load(std::memory_order_relaxed); }

  /// A thread comes or goes.
  void add(StepOfThread& thread);
  void remove(StepOfThread& thread);

  /// Reserves space for what this thread will do in a step if it is to be recorded. Outside of the allocator.
  void prepare(StepOfThread& mine, const ThreadMark& now);
  /// Takes note of an event of a step that this thread writes while ops are watched. `scope` is kept of a scope_begin, and a
  /// gradient is looked up: those not inside the allocator.
  void learn(StepOfThread& mine, const Event& event, const ThreadMark& now, const Context& scope) noexcept;

  /// Gives an event of steady training its place, if it is the expected one. Never locks nor allocates.
  bool repeat(StepOfThread& mine, Event& event, const ThreadMark& now) noexcept;
  /// The same for a scope that begins: the learned one, or null.
  const LearnedScope* repeat_scope(StepOfThread& mine, uint32_t name, const ThreadMark& now) noexcept;
  /// Whether a nodes_created or gradient comes next in the learned step, before the next allocation or scope.
  bool note_is_due(StepOfThread& mine, const ThreadMark& now) noexcept {
    follow_step(mine, now);
    return mine.next_note_ < mine.notes_due_;
  }
  /// Gives that to `note`. False if there is none.
  bool next_note(StepOfThread& mine, const ThreadMark& now, Event& note) noexcept;
  /// Steady training is over. True for the one who ended it. Never locks nor allocates.
  bool leave() noexcept;
  /// Which op made the nodes of this thread since its last allocation is not known any more: from which number on.
  uint64_t first_unsure_node(const StepOfThread& mine, const ThreadMark& now) const noexcept;

  struct End {
    uint32_t context = 0;             ///< the place
    uint64_t next_node = 0;           ///< of the thread that steps
    std::atomic<uint32_t>& call_ids;  ///< the number of the last op call; those of a steady step are taken ahead
    bool grows = false;               ///< more is alive from step to step: each is to be watched
  };
  /// An optimizer's step ended on this thread. True if ops are to be watched from now on, or no more.
  bool end_step(StepOfThread& mine, const End& end);
  /// The step that runs; the first is 1.
  uint32_t step() const noexcept { return step_.load(std::memory_order_relaxed); }
  /// How many steps were steady.
  uint32_t steady_steps() const noexcept { return steady_steps_.load(std::memory_order_relaxed); }

 private:
  /// What is known of the steps so far.
  struct Learned {
    uint32_t boundary = 0;  ///< context of the optimizer step that ends a step
    int other_steps = 0;
    uint64_t signature = 0;
    uint32_t repeats = 0;
    uint32_t steady_steps = 0;  ///< since the last recording
    uint32_t call_ids = 0;      ///< op calls in a step
    uint64_t nodes = 0;         ///< nodes that the stepping thread makes in a step
  };

  /// The first event of a thread in a step begins it.
  void follow_step(StepOfThread& mine, const ThreadMark& now) noexcept {
    const uint32_t step = step_.load(std::memory_order_acquire);
    if (mine.progress_.load(std::memory_order_relaxed) >> 32 != step) [[unlikely]]
      begin_step(mine, now, step);
  }
  void begin_step(StepOfThread& mine, const ThreadMark& now, uint32_t step) noexcept;
  bool is_of_step(const StepOfThread& thread) const noexcept;
  uint32_t script_size(const StepOfThread& thread) const noexcept;
  const Expected* expected(const StepOfThread& mine) const noexcept;
  uint64_t first_node_of(const StepOfThread& mine, uint64_t thread) const noexcept;
  uint64_t node_from_begin(const StepOfThread& mine, const Event& event) const noexcept;
  uint64_t key_of(const StepOfThread& mine, const Event& event, const ThreadMark& now) const noexcept;
  void place(const StepOfThread& mine, Event& event, const Expected& like) const noexcept;
  void record(StepOfThread& mine, const Event& event, const ThreadMark& now, const Context& scope);
  void record_note(StepOfThread& mine, const Event& event);
  uint64_t runner_from_begin(const StepOfThread& mine, const Event& created) const noexcept;
  uint64_t place_of_gradient(StepOfThread& mine, const Event& gradient);
  uint64_t signature_of_step(uint64_t nodes, uint32_t call_ids) const;
  bool steps_equal_scripts() const;
  bool is_boundary(uint32_t context);
  void judge_watched_step(bool alike, bool grows);
  void judge_steady_step(uint64_t nodes, bool grows);
  void begin_recording();

  std::atomic<bool> is_enabled_ = false;
  std::atomic<TrainingMode> mode_ = TrainingMode::learning;
  std::atomic<uint32_t> step_ = 1;           ///< the one that runs
  std::atomic<uint32_t> recording_ = 0;      ///< the newest one
  std::atomic<uint32_t> first_call_id_ = 0;  ///< op calls are counted from here
  std::atomic<uint64_t> first_node_ = 0;     ///< nodes of the stepping thread likewise
  std::atomic<uint16_t> stepping_thread_ = 0;
  std::atomic<uint32_t> repeats_needed_ = 2;
  std::atomic<uint32_t> steady_steps_ = 0;

  std::mutex mutex_;  ///< guards the rest
  std::vector<StepOfThread*> threads_;
  Learned learned_;
};

}  // namespace oomdiag
