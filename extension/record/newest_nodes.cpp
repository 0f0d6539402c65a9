#include "extension/record/newest_nodes.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <string_view>
#include <typeinfo>

#include "extension/record/graph_walk.h"
#include "extension/record/python_node.h"

namespace oomdiag {

namespace {

// Where Node is an intrusive_ptr_target, a weak reference keeps a dead node's members but for what release_resources() lets go
// of. PyTorch's own nodes save in nothing else; a program's own class in C++ may. A node that is written in Python would clear
// a Python object that is being destroyed: it is reached from the node of its output's next op.
bool is_pytorchs_own(const torch::autograd::Node& node) {
  return std::string_view(typeid(node).name()).starts_with("N5torch8autograd") && !is_python_node(node);
}

// Of a wrapper (torch.func) the storage is a member of its own class: no traversal finds it.
bool is_wrapper(const at::Tensor& tensor) {
  const at::TensorImpl& implementation = *tensor.unsafeGetTensorImpl();
  return typeid(implementation) != typeid(at::TensorImpl);
}

}  // namespace

void NewestNodes::remember(const at::Tensor& output) {
  if (!output.defined() || !output.is_cuda() || is_wrapper(output) || !output.requires_grad()) return;
  const NodePtr& node = output.grad_fn();
  if (!node || !is_pytorchs_own(*node)) return;
  if (ring_.size() < kMax) {
    ring_.emplace_back(node);
  } else {
    ring_[next_] = WeakNode(node);
  }
  next_ = (next_ + 1) % kMax;
}

// A saved variable that hooks packed (checkpointing, offloading) keeps the AccumulateGrad node of its leaf after it was
// released, and that the leaf and its gradient: a weak reference to such a node would keep them too.
void NewestNodes::remember(const std::vector<c10::IValue>& outputs) {
  if (saved_tensor_hooks_are_on()) return;
  for (const auto& output : outputs) {
    if (output.isTensor()) {
      remember(output.toTensor());
    } else if (output.isTensorList()) {
      for (const at::Tensor& tensor : output.toTensorVector()) remember(tensor);
    }
  }
}

std::vector<NodePtr> NewestNodes::living() const {
  std::vector<NodePtr> alive;
  const size_t count = ring_.size();
  for (size_t i = 1; i <= count; ++i) {
    if (NodePtr node = ring_[(next_ + count - i) % count].lock()) alive.push_back(std::move(node));
  }
  return alive;
}

}  // namespace oomdiag
