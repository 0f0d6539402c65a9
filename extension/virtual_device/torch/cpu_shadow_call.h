#pragma once

#include <ATen/core/stack.h>
#include <ATen/record_function.h>

#include <memory>

#include "extension/virtual_device/torch/operators.h"

namespace oomdiag {

/// A call on the CPU with the contents that the inputs had when the real one began. With uniform values it has one number for
/// each tensor, since all of a tensor's are the same: such tensors may have any size.
struct CpuShadowCall {
  OperatorRules* rules = nullptr;
  torch::jit::Stack arguments{};
  bool is_known = true;
  bool is_uniform = false;
  int64_t read_numbers = 0;  ///< of the first tensor
  size_t most_bytes = 0;     ///< of a tensor that is not uniform
};

/// Null where the inputs are too large, or of them nothing is known that a guess may rest on. `guesses_ones`: numbers that are
/// not known are taken as ones and not as zeros.
std::unique_ptr<CpuShadowCall> make_shadow_call(OperatorRules& rules, c10::ArrayRef<const c10::IValue> inputs,
                                                bool guesses_ones);

/// Runs it: `arguments` become results. False where this CPU cannot.
bool run(CpuShadowCall& shadow);

}  // namespace oomdiag
