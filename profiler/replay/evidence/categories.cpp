#include "profiler/replay/evidence/categories.h"

#include <algorithm>
#include <array>

#include "profiler/one_of.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/history.h"

// What is a block? The allocator does not know, and PyTorch's own tools need a Python tracer to know. We put together
// what the hooks saw, strongest evidence first, each block in one category:
//
//   1 named        a parameter, a buffer or a gradient: an event named its storage. DDP's buckets are gradients, too. A
//                  parameter that a node saves for backward stays a parameter. What will *become* a gradient is still in flight before AccumulateGrad ran.
//   2 optimizer    the optimizer has it in its state: also what was loaded from a file. Or allocated inside "Optimizer.step…". If the step is over, it is state: that is what survives a step. If
//                  the step is still open, only ops that make state (zeros_like, …) count; the rest are its temporaries.
//   3 saved        kept by a node of the living graph. Made by an op that recorded itself: an activation. Made in setup or
//                  by an op that made no node: it is where the graph begins, an input.
//   4 dying        freed before its op ends. In ops that ask libraries for a workspace (cuDNN, cuBLAS, attention) it is
//                  that, else a temporary. In an op that *failed* nothing was freed in time: its first block is its
//                  result (PyTorch allocates outputs first), the others are workspace or temporaries.
//   5 kept by cuBLAS  PyTorch keeps one workspace per handle and stream, of a known size, made inside the first gemm.
//   6 backward     made by a node and alive: a gradient on its way. What checkpointing computes again is an activation.
//   7 forward      made by a forward op and alive, but saved by nobody: an output that somebody holds. Fresh tensors made
//                  outside of modules by ops that copy or create (the batch of this step) are inputs.
//   8 the rest     unknown, and never spread over the others. Only where the modules named all that is theirs does what ops
//                  outside of them made in setup count as inputs: the data set on the GPU, the first batch, however it
//                  was normalised and put together. Of what is made between the steps copied or created tensors do (a batch
//                  that autograd keeps a cast copy of), and what other ops made is an output that somebody holds.
//                  Before a module was called, and where none ever is (kernels of Triton on tensors of one's own), any
//                  tensor may be a weight but those that are drawn at random, which are inputs, and those that ops
//                  computed or made empty in the shape of another, for a kernel to fill: outputs that somebody holds.

namespace oomdiag {
namespace {

bool is_drawn(std::string_view op) { return op.starts_with("aten::rand"); }

/// A module that is made, moved or loaded makes its tensors by these; `empty_like` in none of them.
bool may_make_weights(std::string_view op) {
  constexpr std::array<std::string_view, 9> kMakers = {"aten::clone",     "aten::contiguous",     "aten::zeros_like",
                                                       "aten::ones_like", "aten::full_like",      "aten::detach",
                                                       "aten::eye",       "aten::empty_permuted", "aten::set_"};
  return op != "aten::empty_like" && (brings_data(op) || is_one_of(op, kMakers));
}

/// What ops made outside of modules, in a program of which no module is known.
Category category_without_modules(const AllocationEvidence& e) {
  if (e.op.find("::") == e.op.npos || e.in_module) return Category::unknown;
  if (is_drawn(e.op)) return Category::input;
  return may_make_weights(e.op) ? Category::unknown : Category::output;
}

// A function written in Python appears as an op named after its class; the ops inside of it record nothing.
bool is_python_function(std::string_view op) { return !op.empty() && op.find("::") == op.npos; }

bool begins_graph(const AllocationEvidence& e) {
  if (e.phase == Phase::setup) return true;
  return !e.op_made_nodes && !e.in_node && !is_python_function(e.op);
}

Category saved_category(const AllocationEvidence& e) {
  return begins_graph(e) ? Category::input : Category::activation;
}

/// One op for a whole layer, in evaluation: what products inside of it make are results, one for the next.
bool is_whole_layer(std::string_view op) {
  return is_one_of(op, {"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"});
}

Category dying_category(const AllocationEvidence& e) {
  const bool is_workspace = takes_workspace(e.inner) && !e.first_in_op && !(is_whole_layer(e.op) && is_gemm(e.inner));
  return is_workspace ? Category::workspace : Category::temporary;
}

/// What a closure makes that an optimizer's step calls is none of its own: forward passes and what backward makes of them.
bool is_of_optimizer(const AllocationEvidence& e) {
  return e.in_optimizer && !e.in_node && !e.in_module && !e.op_made_nodes && !e.saved;
}

Category living_category(const AllocationEvidence& e) {
  switch (e.phase) {
    case Phase::backward:
      return e.recomputed ? Category::activation : Category::activation_gradient;
    case Phase::forward:
    case Phase::optimizer:
      return brings_data(e.op) && !e.in_module && !e.op_made_nodes ? Category::input : Category::output;
    case Phase::setup:
      if (!e.modules_known) return category_without_modules(e);
      return !e.op.empty() && !e.in_module ? Category::input : Category::unknown;
    case Phase::other:
      if (!e.modules_known) return category_without_modules(e);
      if (e.op.empty()) return Category::unknown;
      return brings_data(e.op) && !e.in_module ? Category::input : Category::output;
  }
  return Category::unknown;
}

}  // namespace

Category categorise(const AllocationEvidence& e) {
  if (e.parameter) return Category::parameter;
  if (e.buffer) return Category::buffer;
  if (e.gradient || e.bucket) return Category::gradient;
  if (e.state) return Category::optimizer_state;
  if (is_of_optimizer(e)) {
    const bool state = !e.optimizer_is_open || makes_state(e.inner) || makes_state(e.op);
    return state ? Category::optimizer_state : Category::temporary;
  }
  if (e.saved || (e.ever_saved && begins_graph(e))) return saved_category(e);
  if (e.dies_in_op) return dying_category(e);
  if (e.kept_workspace) return Category::workspace;
  return living_category(e);
}

bool brings_data(std::string_view op) {
  constexpr std::array<std::string_view, 17> kBringers = {
      "aten::to",           "aten::_to_copy",      "aten::copy_",      "aten::cuda",
      "aten::empty",        "aten::empty_strided", "aten::zeros",      "aten::ones",
      "aten::full",         "aten::rand",          "aten::randn",      "aten::randint",
      "aten::randperm",     "aten::arange",        "aten::lift_fresh", "aten::empty_like",
      "aten::scalar_tensor"};
  return is_one_of(op, kBringers);
}

bool makes_state(std::string_view op) {
  constexpr std::array<std::string_view, 8> kMakers = {"aten::zeros_like", "aten::full_like", "aten::empty_like",
                                                       "aten::ones_like",  "aten::zeros",     "aten::full",
                                                       "aten::empty",      "aten::clone"};
  return is_one_of(op, kMakers);
}

bool is_gemm(std::string_view op) {
  constexpr std::array<std::string_view, 13> kGemms = {"aten::mm",
                                                       "aten::addmm",
                                                       "aten::bmm",
                                                       "aten::baddbmm",
                                                       "aten::addbmm",
                                                       "aten::linear",
                                                       "aten::mv",
                                                       "aten::addmv",
                                                       "aten::dot",
                                                       "aten::vdot",
                                                       "aten::_addmm_activation",
                                                       "aten::_scaled_mm",
                                                       "aten::matmul"};
  return is_one_of(op, kGemms);
}

bool is_cublas_workspace(int64_t requested_bytes, int64_t known_bytes) {
  // CUBLASLT_WORKSPACE_SIZE by default, and what PyTorch gives a handle (ATen/cuda/CublasHandlePool.cpp): 8 MiB and a
  // little, 32 MiB from Hopper on.
  if (requested_bytes == kMiB) return true;
  if (known_bytes > 0) return requested_bytes == round_size(known_bytes, {});
  return requested_bytes == 8 * kMiB + 128 * kKiB || requested_bytes == 32 * kMiB;
}

bool takes_workspace(std::string_view op) {
  constexpr std::string_view kAttentionOfProducts = "aten::_scaled_dot_product_attention_math";  // no fused kernel
  if (op == kAttentionOfProducts) return false;
  constexpr std::array<std::string_view, 10> kPrefixes = {"aten::cudnn_convolution", "aten::convolution",
                                                          "aten::_convolution",      "aten::_scaled_dot_product_",
                                                          "aten::_flash_attention_", "aten::_efficient_attention_",
                                                          "aten::_cudnn_attention_", "aten::_cudnn_rnn",
                                                          "aten::cudnn_batch_norm",  "aten::slow_conv"};
  const auto begins = [&](std::string_view prefix) { return op.starts_with(prefix); };
  return is_gemm(op) || std::any_of(kPrefixes.begin(), kPrefixes.end(), begins);
}

}  // namespace oomdiag
