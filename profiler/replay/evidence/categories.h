#pragma once

#include <string_view>

#include "profiler/replay/history.h"

namespace oomdiag {

/// What is known of one live block when its category is decided. All of it belongs to this instance of the block, not to
/// its address: addresses are used again.
struct AllocationEvidence {
  bool parameter = false;  ///< an event named its storage so; likewise the next three
  bool buffer = false;
  bool gradient = false;
  bool state = false;       ///< an optimizer has it in its state
  bool bucket = false;      ///< DistributedDataParallel made it, to reduce gradients in
  bool saved = false;       ///< a node of the graph that lives at the moment keeps it for backward
  bool ever_saved = false;  ///< a node kept it at some time

  Phase phase = Phase::other;      ///< in which it was allocated
  bool in_node = false;            ///< … by an autograd node
  bool recomputed = false;         ///< … by a forward op that checkpointing runs again
  bool in_optimizer = false;       ///< … inside an optimizer step
  bool optimizer_is_open = false;  ///< … which had not ended at the moment
  bool in_module = false;
  bool op_made_nodes = false;  ///< the op that allocated it recorded itself for backward
  bool grad_mode = false;
  bool first_in_op = true;      ///< nothing was allocated before it by the same op call
  bool dies_in_op = false;      ///< freed before its op or node ended; or that op failed and it was not its first block
  bool kept_workspace = false;  ///< the block that cuBLAS keeps for this thread and stream, by its size
  bool modules_known = false;   ///< parameters and buffers come from the modules: what they do not name is neither
  std::string_view op{}, inner{};  ///< outermost and innermost operator
};

/// Exactly one category; the first rule that holds. See categories.cpp.
Category categorise(const AllocationEvidence& evidence);

/// Whether this operator copies or creates a tensor.
bool brings_data(std::string_view op);
/// Whether optimizers make their state with this operator; with others they make temporaries.
bool makes_state(std::string_view op);
/// Whether this operator multiplies matrices through cuBLAS, which has a workspace.
bool is_gemm(std::string_view op);
/// Whether cuBLAS or cublasLt is given a workspace of this size. `known_bytes`: that of the GPU, 0 = not known.
bool is_cublas_workspace(int64_t requested_bytes, int64_t known_bytes);
/// Whether this operator may take a workspace for itself: convolutions, attention, recurrent layers, and gemm.
bool takes_workspace(std::string_view op);

}  // namespace oomdiag
