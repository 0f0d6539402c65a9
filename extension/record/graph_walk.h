#pragma once

#include "profiler/event.h"

namespace at {
class Tensor;
}

namespace oomdiag {

struct ThreadState;

/// Called when a node of another graph task than before starts on this thread. `root` is the node (torch::autograd::Node).
/// Walks the graph then if this backward pass may set the peak, or if several devices' threads will work on it; otherwise
/// an OOM in it walks it from `root`. `nested`: it runs inside of another node.
void enter_graph_task(ThreadState& state, int task, void* root, bool nested);

/// Called when a node of a graph task is met that ran already when it was not watched: notes the task, walks nothing.
void join_graph_task(ThreadState& state, int task, void* node);

/// Describes to the trace what autograd holds at an OOM on this thread: the graphs of the tasks that run on it, or in
/// forward those of the newest outputs. Then, in backward, which gradient was being made.
void describe_graph_at_refusal(ThreadState& state);

/// Describes to the trace what the graph behind `output` holds now. No other thread may execute it.
void walk_graph_of(ThreadState& state, const at::Tensor& output);

/// Writes the gradient that the AccumulateGrad node which runs on this thread has just accumulated.
void note_accumulated_gradient(ThreadState& state, const Context& context);

}  // namespace oomdiag
