// Small things are computed, and large ones that are all one number. Kernels do nothing; but programs decide by small tensors
// what to do next: whether all sequences have ended, how long the longest object is, whether a number is finite. Where the host
// wrote what an elementwise operator, a reduction or a concatenation reads, the same operator runs on the CPU too, and its
// result becomes the contents of the result on the GPU. What kernels are seen to write otherwise is forgotten.
//
//   x = torch.tensor([3, 1]).cuda()     contents from the host
//   x.max()                             the kernel does nothing; the CPU's 3 is put in its place
//   x[x > 1]                            two kernels count and collect: the size that they ask for is given to them
//   torch.ones(1 << 30).sum()           one number stands for all, and is multiplied
//   y = model(x)                        not known
//   (y == 2).any()                      a guess
//
// A guess: truth values and whole numbers are computed from zeros where contents are not known, which is as what the GPU
// holds reads; from ones inside of operators that fail by zeros. A read of a guess is noted as one of what a kernel
// wrote.
//
// Work that is captured into a graph does nothing now: what it will write is forgotten whenever the graph runs.
//
// It is done by an observer of operators (ATen/record_function.h), as profilers are, and changes nothing on the GPU: the
// operator's own work and allocations are as before.

#include "extension/virtual_device/torch/compute.h"

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/torch/cpu_shadow_call.h"
#include "extension/virtual_device/torch/operators.h"
#include "extension/virtual_device/torch/spans.h"

namespace oomdiag {
namespace {

using Argument = OperatorRules::Argument;

/// An operator that runs.
struct Call : at::ObserverContext {
  std::unique_ptr<CpuShadowCall> shadow;
  /// Tensors of lists that it writes, as _foreach_add_: on the GPU, and of the shadow.
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  int known_before = 0;  ///< oomdiag_device_set_known_kernels
  bool has_run = false;  ///< the shadow, for what the operator asked for
  bool has_kernels = false;
  bool validates = false;
};

/// Operators that validate and run on this thread: inside of them numbers that are not known are taken as ones.
thread_local int validating = 0;

template <typename Use>
void for_written(const OperatorRules& rules, c10::ArrayRef<const c10::IValue> inputs, Use use) {
  for (size_t i = 0; i < inputs.size() && i < rules.arguments.size(); ++i) {
    if (rules.arguments[i] == Argument::read) continue;
    if (inputs[i].isTensor()) use(inputs[i].toTensor());
    if (!inputs[i].isTensorList()) continue;
    for (const at::Tensor& tensor : inputs[i].toTensorVector()) use(tensor);
  }
}

/// Supplies what the operator will ask the GPU for; true if the shadow has run for it.
bool expect_answer(CpuShadowCall& shadow) {
  using Asks = OperatorRules::Asks;
  const Asks asks = shadow.rules->asks;
  const at::Tensor read = shadow.arguments[0].toTensor();
  const bool counts = asks == Asks::nonzero || (asks == Asks::distinct_or_trues && read.scalar_type() == at::kBool);
  if (shadow.is_uniform && asks != Asks::truth) {
    oomdiag_device_expect(!counts ? 1 : read.is_nonzero() ? shadow.read_numbers : 0, shadow.is_known);
    return false;
  }
  if (!run(shadow)) return false;
  const c10::IValue& answer = shadow.arguments[0];
  const int64_t number = asks == Asks::truth ? int64_t{answer.toBool()}
                         : counts            ? read.count_nonzero().item<int64_t>()
                                             : answer.toTensor().size(0);
  oomdiag_device_expect(number, shadow.is_known);
  return true;
}

/// The call on the CPU that goes with this one; null where nothing follows from what is known, which then is forgotten.
std::unique_ptr<CpuShadowCall> begin(OperatorRules& rules, c10::ArrayRef<const c10::IValue> inputs) {
  if (oomdiag_device_is_capturing()) {
    for_written(rules, inputs, forget_at_replay);
    return nullptr;
  }
  if (rules.is_computable && !c10::impl::dispatch_mode_enabled()) {
    if (auto shadow = make_shadow_call(rules, inputs, validating > 0)) return shadow;
  }
  for_written(rules, inputs, forget);
  return nullptr;
}

/// Tensors of lists that an operator without results writes, each with its copy in the shadow.
std::vector<std::pair<at::Tensor, at::Tensor>> list_written(const CpuShadowCall& shadow,
                                                            c10::ArrayRef<const c10::IValue> inputs) {
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  if (!shadow.rules->handle->schema().returns().empty()) return written;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (shadow.rules->arguments[i] == Argument::read || !inputs[i].isTensorList()) continue;
    const auto there = inputs[i].toTensorVector(), here = shadow.arguments[i].toTensorVector();
    for (size_t k = 0; k < there.size(); ++k) written.emplace_back(there[k], here[k]);
  }
  return written;
}

std::unique_ptr<at::ObserverContext> at_start(const at::RecordFunction& call) {
  const int known_before = oomdiag_device_set_known_kernels(1);
  oomdiag_device_set_known_kernels(known_before + 1);
  try {
    OperatorRules& rules = find_rules(call);
    const bool is_plain = !rules.is_foreign && !rules.has_kernels && !rules.validates;
    if (is_plain && (!rules.handle || (!rules.is_computable && !rules.changes_contents))) return nullptr;
    const at::DisableRecordFunctionGuard no_ops;
    auto shadow = rules.handle ? begin(rules, call.inputs()) : nullptr;
    if (!shadow && is_plain) return nullptr;
    auto running = std::make_unique<Call>();
    running->known_before = known_before;
    running->has_kernels = rules.has_kernels && !oomdiag_device_is_capturing();
    running->validates = rules.validates;
    if (rules.is_foreign) oomdiag_device_set_known_kernels(0);
    if (shadow && rules.asks != OperatorRules::Asks::nothing) running->has_run = expect_answer(*shadow);
    if (shadow) running->written = list_written(*shadow, call.inputs());
    running->shadow = std::move(shadow);
    validating += rules.validates ? 1 : 0;  // at_end takes it back, if there is a context
    return running;
  } catch (const std::exception&) {
    return nullptr;
  }
}

/// Gives `there`, on the GPU, the contents of `here`.
void put(const at::Tensor& there, const at::Tensor& here, const CpuShadowCall& shadow) {
  if (!is_on_gpu(there) || there.sizes() != here.sizes() || there.scalar_type() != here.scalar_type()) return;
  const bool is_guess = !shadow.is_known;
  if (is_guess && !is_whole_number(here)) return forget(there);
  const Span span = span_of(there);
  if (span.bytes == 0 || span.bytes > shadow.most_bytes) return;
  if (!there.is_non_overlapping_and_dense() && !is_known(there)) return forget(there);
  const at::Tensor whole = mirror(there);
  whole.copy_(here);
  if (is_guess) {
    oomdiag_device_guess(span.begin, whole.const_data_ptr(), span.bytes);
  } else {
    oomdiag_device_copy(span.begin, whole.const_data_ptr(), span.bytes);
  }
}

/// Fills `there` with the one number of `here`.
void put_uniform(const at::Tensor& there, const at::Tensor& here, const CpuShadowCall& shadow) {
  if (!is_on_gpu(there) || there.numel() == 0) return;
  const bool fits = here.numel() == 1 && there.scalar_type() == here.scalar_type() && here.element_size() <= 16;
  const bool may_say = shadow.is_known || is_whole_number(here);
  if (!fits || !may_say || !there.is_non_overlapping_and_dense()) return forget(there);
  const bool is_sum = shadow.rules->sums;
  const at::Tensor number = (is_sum ? here.mul(shadow.read_numbers / there.numel()) : here).contiguous();
  const Span span = span_of(there);
  oomdiag_device_fill_numbers(span.begin, span.bytes, number.const_data_ptr(), number.element_size(), !shadow.is_known);
}

void put_all(const std::vector<c10::IValue>& there, const CpuShadowCall& shadow) {
  const at::DisableRecordFunctionGuard no_ops;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (size_t i = 0; i < there.size() && i < shadow.arguments.size(); ++i) {
    if (!there[i].isTensor() || !shadow.arguments[i].isTensor()) continue;
    (shadow.is_uniform ? put_uniform : put)(there[i].toTensor(), shadow.arguments[i].toTensor(), shadow);
  }
}

/// Small inputs may have large results, and numbers that no host wrote are not guessed at. One that failed has no results.
bool is_worth_computing(const CpuShadowCall& shadow, const std::vector<c10::IValue>& results) {
  if (results.empty()) return false;
  if (!shadow.rules->is_computable || (shadow.is_uniform && !shadow.rules->takes_uniform_values)) return false;
  bool may_guess = false;
  for (const c10::IValue& result : results) {
    if (!result.isTensor() || !result.toTensor().defined()) return false;
    if (!shadow.is_uniform && result.toTensor().nbytes() > shadow.most_bytes) return false;
    may_guess |= is_whole_number(result.toTensor());
  }
  return shadow.is_known || may_guess;
}

void forget_all(const std::vector<c10::IValue>& results) {
  for (const c10::IValue& result : results) {
    if (result.isTensor() && result.toTensor().defined()) forget(result.toTensor());
  }
}

/// What a list's tensors have now, or that nobody knows it.
void put_lists(Call& running) {
  const at::DisableRecordFunctionGuard no_ops;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const bool has_run = running.shadow->rules->is_computable && run(*running.shadow);
  for (const auto& [there, here] : running.written) {
    if (has_run) {
      put(there, here, *running.shadow);
    } else {
      forget(there);
    }
  }
}

void finish(Call& running, const std::vector<c10::IValue>& results) try {
  CpuShadowCall* const shadow = running.shadow.get();
  if (shadow && shadow->rules->asks != OperatorRules::Asks::nothing) oomdiag_device_expect(-1, false);
  if (!running.written.empty()) return put_lists(running);
  if (shadow && is_worth_computing(*shadow, results)) {
    if (running.has_run || run(*shadow)) put_all(results, *shadow);
  } else if (running.has_kernels || (shadow && shadow->rules->changes_contents)) {
    forget_all(results);
  }
} catch (const std::exception&) {
}

void at_end(const at::RecordFunction& call, at::ObserverContext* context) {
  if (!context) {
    oomdiag_device_set_known_kernels(oomdiag_device_set_known_kernels(0) - 1);
    return;
  }
  Call& running = *static_cast<Call*>(context);
  oomdiag_device_set_known_kernels(running.known_before);
  validating -= running.validates ? 1 : 0;
  finish(running, call.outputs());
}

}  // namespace

void start_computing() {
  if (!oomdiag_device_keeps_contents()) return;
  auto callback = at::RecordFunctionCallback(at_start, at_end);
  callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION});
  at::addGlobalCallback(callback);
}

}  // namespace oomdiag
