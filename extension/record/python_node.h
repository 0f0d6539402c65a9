#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <vector>

#include "extension/record/newest_nodes.h"
#include "extension/record/python_api.h"

namespace oomdiag {

/// Whether a node is written in Python: its class lies in libtorch_python.
bool is_python_node(const torch::autograd::Node& node) noexcept;

/// Whether what such nodes save can be read with this torch. With the GIL.
bool python_nodes_are_readable(const PythonApi& api);

/// What an autograd node saved that is written in Python (a PyNode: torch.autograd.Function, or a graph of torch.compile). No
/// function of the program's is asked, as Node::compiled_args would: its `_compiled_autograd_key`. To be made and dropped with
/// the GIL.
class SavedByPythonNode {
 public:
  SavedByPythonNode(const PythonApi& api, const NodePtr& node);

  /// Whether what is saved could be read.
  bool known() const { return known_; }
  /// They live as long as this.
  const std::vector<const torch::autograd::SavedVariable*>& variables() const { return variables_; }

 private:
  PythonRef node_;
  PythonRef saved_;  ///< a tuple of torch._C._autograd.SavedTensor
  std::vector<const torch::autograd::SavedVariable*> variables_;
  bool known_ = false;
};

}  // namespace oomdiag
