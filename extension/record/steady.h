#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "profiler/event.h"

// Steady training. Steps repeat: once a step's allocations are those of the steps before, in the same order and at the same
// places, the op callbacks tell nothing new. They are switched off then, and an allocation gets its place in the program
// from its place in the learned step. The first allocation that is not the expected one switches them on again.
//
//   learning ── two steps alike ──► recording ── once more ──► steady ── every 64th step ──► recording …
//      ▲                                └───────── not alike ─────┴──────────────────────┐
//      └─────────────────────────────────────────────────────────────────────────────────┘
//
// A step ends with the end of the optimizer's step that ended the first one. Frees are not compared: their places matter to
// nobody, and the garbage collector moves them. User scopes are watched in steady training too; they are few.
namespace oomdiag {

struct ThreadState;

/// What one thread did in a step: its allocations and scopes, the autograd nodes that its forward ops made, and the
/// gradients that it accumulated. Written by its own thread, read by the one that ends the step.
struct StepOfThread {
  std::atomic<uint32_t> step = 0;   ///< the step that the rest speaks about
  std::atomic<uint32_t> count = 0;  ///< events so far
  std::atomic<uint64_t> hash = 0;   ///< of all of them
  uint64_t nodes = 0;               ///< in steady training: this thread's next node number at its last allocation
  /// The learned step. Numbers of nodes and op calls are counted from its begin. The address of an alloc is the newest, that
  /// of a gradient the number of its alloc in the script or kElsewhere, that of a scope_begin the number of its context.
  std::vector<Event> script{};
  std::vector<Context> scopes{};
  static constexpr uint64_t kElsewhere = ~uint64_t{0};
};

enum class TrainingMode : uint8_t { learning, recording, steady };
extern std::atomic<TrainingMode> training_mode;
inline bool steady() noexcept { return training_mode.load(std::memory_order_relaxed) == TrainingMode::steady; }

/// Forgets what was learned. `wanted` = false keeps the op callbacks on for good.
void restart_learning(bool wanted) noexcept;

/// Makes room for what this thread will do in a step if it is to be recorded. Outside of the allocator.
void prepare_recording(ThreadState& state);

/// Takes note of an event of a step that this thread writes while ops are watched. Runs inside the allocator.
void learn(ThreadState& state, const Event& event) noexcept;

/// Gives an alloc of steady training its place. False, and the end of steady training, where another one was expected; an
/// out_of_memory always is. Runs inside the allocator; `state` may be null.
bool repeat(ThreadState* state, Event& event) noexcept;

/// The same for a scope that begins: gives `state.context` its line. Outside of the allocator.
bool repeat_scope(ThreadState& state, uint32_t name);

/// Tells a request that ended steady training which autograd node it was made in. Runs inside the allocator.
void place_in_backward(Event& event) noexcept;

/// To be called once the event that ended steady training is written. Runs inside the allocator.
void note_surprise(ThreadState& state, const Event& event) noexcept;

/// Finds out where it was, by its stack. `running` is the op that starts now, null if none does: where it starts inside of
/// the surprising op, Python still stands at the same line. Outside of the allocator.
void settle_surprise(ThreadState& state, const char* running);

/// Writes the nodes_created and gradients that follow in the learned step, up to the next allocation or scope.
void repeat_notes(ThreadState& state) noexcept;

/// The end of an optimizer's step on this thread; `context` names the place. Outside of the allocator.
void end_of_step(ThreadState& state, uint32_t context);

}  // namespace oomdiag
