#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>  // Node: the destructor of a vector of them

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace c10 {
struct IValue;
}

namespace oomdiag {

/// A pointer that owns an autograd node: a shared_ptr, from torch 2.13 on an intrusive_ptr.
using NodePtr = std::remove_cvref_t<decltype(std::declval<at::Tensor>().grad_fn())>;

template <class Pointer>
struct WeakPointer;
template <class T>
struct WeakPointer<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <class T>
struct WeakPointer<c10::intrusive_ptr<T>> {
  using type = c10::weak_intrusive_ptr<T>;
};

/// The autograd nodes that made the newest outputs of a thread: an OOM in forward has no graph task, but what these nodes can
/// reach is the graph so far. They are held weakly, and the tensors not at all: PyTorch counts the weak references to a tensor
/// (torch.utils.swap_tensors), nobody those to a node. A dead node has let go of what it saved; what stays of it, some hundred
/// bytes, is gone 256 outputs later. One thread.
class NewestNodes {
 public:
  /// Of the tensors among `outputs`.
  void remember(const std::vector<c10::IValue>& outputs);
  /// Those that are alive, newest first.
  std::vector<NodePtr> living() const;

 private:
  using WeakNode = WeakPointer<NodePtr>::type;
  static constexpr size_t kMax = 256;

  void remember(const at::Tensor& output);

  std::vector<WeakNode> ring_;
  size_t next_ = 0;
};

/// What is equal while the graph of a thread stays as it is: it makes no node, no backward pass begins, and none of the newest
/// nodes dies.
struct GraphMark {
  uint64_t walk = 0;       ///< the newest in the process; 0 = none
  uint64_t next_node = 0;  ///< sequence number
  int task = -1;           ///< the newest graph task
  size_t newest = 0;       ///< of the newest nodes, how many are alive

  bool operator==(const GraphMark&) const = default;
};

/// The graph that was described at the last OOM of a thread; the mark is empty where it is small.
struct DescribedGraph {
  GraphMark mark;
  double written_at = 0;  ///< the trace's times_overwritten()
};

}  // namespace oomdiag
