#pragma once

#include <cstdint>

namespace oomdiag {

/// What the recorder knows of the inside of PyTorch and CPython by its name or layout, so that no compiler notices when it
/// changes. Each is looked for when recording begins or where it is first used, which costs nothing that can be measured; what
/// is not there is noted once in the trace, and then stands in the report's limitations and in `oomdiag doctor`.
enum class InternalName : uint8_t {
  module_call,
  module_tables,
  optimizer_step,
  parameter_groups,
  group_variable,
  default_group,
  tensor_address,
  saved_by_python,
  operator_symbols,
  engine_symbol,
  node_event,
  node_type,
  python_frames,
};

struct InternalNameFacts {
  InternalName which;
  const char* lost;   ///< what a report lacks without it
  const char* name;   ///< what is looked for
  const char* where;  ///< and in what
};

inline constexpr InternalNameFacts kInternalNames[] = {
    // When recording begins.
    {InternalName::module_call, "module paths", "_wrapped_call_impl", "torch/nn/modules/module.py"},
    {InternalName::optimizer_step, "steps of optimizers", "'Optimizer.step#'", "torch/optim/optimizer.py"},
    {InternalName::group_variable, "the parameter group of an OOM in a step", "the variable 'group'",
     "torch.optim.SGD.step"},
    {InternalName::tensor_address, "names of parameters and buffers", "_cdata", "torch._C.TensorBase"},
    {InternalName::saved_by_python, "what functions written in Python saved", "_raw_saved_tensors",
     "torch._C._FunctionBase"},
    {InternalName::operator_symbols, "ops of the first request that differs from the learned step", "at::_ops",
     "libtorch_cpu.so"},
    {InternalName::engine_symbol, "ops inside of a backward pass", "torch::autograd::Engine", "libtorch_cpu.so"},
    {InternalName::python_frames, "places of learned steps, so that each is recorded in full", "the layout of frames",
     "CPython"},
    // Where they are first used.
    {InternalName::module_tables, "names of parameters and buffers", "_modules, _parameters, _buffers",
     "torch.nn.Module"},
    {InternalName::parameter_groups, "parameter groups", "param_groups", "torch.optim.Optimizer"},
    {InternalName::default_group, "the rank of a process", "_world._default_pg, its rank() and size()",
     "torch.distributed"},
    {InternalName::node_event, "autograd nodes", "'autograd::engine::evaluate_function: '", "libtorch_cpu.so"},
    {InternalName::node_type, "the type of a node, so that no step is learned", "the table of virtual functions",
     "torch::autograd::Node"},
};

/// Looks for those of the first part. Once, when recording has begun.
void check_internal_names() noexcept;

/// Notes, once, that it is not there. Not in the allocator.
void note_missing(InternalName which) noexcept;

}  // namespace oomdiag
