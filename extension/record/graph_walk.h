#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <cstddef>

#include "profiler/event.h"

namespace at {
class Tensor;
}

namespace oomdiag {

struct ThreadState;

/// Whether PyTorch's visitor calls the hooks that saved tensors were packed with, as in 2.6. A program would notice: PyTorch's
/// own checkpoints unpack a tensor once.
template <class Saved>
constexpr bool visitor_unpacks = !requires(const Saved& saved) {
  saved.retrieve_unpack_hook_data();
};

/// Whether any tensor was saved under such hooks.
inline std::atomic<bool> hooks_were_seen = false;

/// Whether what an op of this thread saves is packed by hooks now.
inline bool saved_tensor_hooks_are_on() { return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty(); }

/// Called when an op starts: notes whether what it saves is packed, where that matters.
template <class Saved = torch::autograd::SavedVariable>
void look_for_saved_tensor_hooks() {
  if constexpr (visitor_unpacks<Saved>) {
    if (saved_tensor_hooks_are_on()) hooks_were_seen.store(true, std::memory_order_relaxed);
  }
}

/// Called when `node` (a torch::autograd::Node) of a graph task starts on this thread, inside of `level` others. If it is
/// the first one of its task, walks the graph where this backward pass may set the peak, or where several devices' threads
/// will work on it; otherwise an OOM in it walks it from `node`.
void enter_graph_task(ThreadState& state, size_t level, int task, void* node);

/// Called when a node of a graph task is found that ran already when it was not watched: notes the task, walks nothing.
void join_graph_task(ThreadState& state, size_t level, int task, void* node);

/// Describes to the trace what autograd holds at an OOM on this thread: the graphs of the tasks that run on it, or in
/// forward those of the newest outputs. Then, in backward, which gradient was being made.
void describe_graph_at_oom(ThreadState& state);

/// Describes to the trace what the graph behind `output` holds now. No other thread may execute it.
void walk_graph_of(ThreadState& state, const at::Tensor& output);

/// Writes the gradient that the AccumulateGrad node which runs on this thread has just accumulated.
void note_accumulated_gradient(ThreadState& state, const Context& context);

}  // namespace oomdiag
