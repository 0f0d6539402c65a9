#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace oomdiag {

/// A backward pass that runs on this thread.
struct RunningTask {
  int id = -1;
  void* root = nullptr;  ///< the first of its nodes (torch::autograd::Node) that ran here and lives on, or null
};

/// The backward passes that nodes of this thread belong to, an entry for each node that runs inside of another one.
///
/// Roots are borrowed from the engine, which keeps the nodes of a task alive while the task runs. All but one: where backward
/// begins at several tensors, they hang on a node of the engine's own (GraphRoot), which is gone as soon as it has run.
///
/// That a task runs is known as long as one of its nodes does, and of the node that follows; between them, and when a nested
/// pass has ended, it is not. So an entry says nothing unless a node runs at its level, and `running` hands out no other.
class RunningTasks {
 public:
  /// A node of `task` begins to run inside of `level` others; null where it does not live on. True if it is the first one of
  /// its task here.
  bool begin_node(size_t level, int task, void* node) {
    levels_.resize(level + 1);  // what ran inside of the node before it has ended
    RunningTask& running = levels_[level];
    const bool is_first = running.id != task;
    if (is_first || running.root == nullptr) running = {task, node};
    return is_first;
  }
  /// The tasks of the nodes that run, the outermost first, where `nodes` of them do.
  std::span<const RunningTask> running(size_t nodes) const {
    return std::span(levels_).first(nodes < levels_.size() ? nodes : levels_.size());
  }

 private:
  std::vector<RunningTask> levels_;
};

}  // namespace oomdiag
