#include "extension/virtual_device/torch/cpu_shadow_call.h"

#include <ATen/TensorSubclassLikeUtils.h>

#include <optional>

#include "extension/virtual_device/torch/spans.h"

namespace oomdiag {
namespace {

using Argument = OperatorRules::Argument;

constexpr size_t kMaxBytes = 256 << 10;
constexpr size_t kMaxCopiedBytes = 4 << 20;  // as much as is kept of one copy (driver/contents.h)

size_t most_bytes(const OperatorRules& rules) {
  return rules.copies || rules.asks != OperatorRules::Asks::nothing ? kMaxCopiedBytes : kMaxBytes;
}

class ShadowCallMaker {
 public:
  ShadowCallMaker(CpuShadowCall& shadow, bool guesses_ones) : shadow_(shadow), guesses_ones_(guesses_ones) {}

  /// False if the argument is too large or not plain.
  bool add(const c10::IValue& value, Argument kind) {
    if (value.isTensor()) {
      const auto copy = convert(value.toTensor(), kind);
      if (copy) shadow_.arguments.emplace_back(*copy);
      return copy.has_value();
    }
    if (value.isTensorList()) return add_list(value.toTensorVector(), kind);
    if (value.isList() && value.toListRef().size() > 0 &&
        (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone()))
      return add_optional_list(value.toListRef(), kind);
    shadow_.arguments.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value);
    return true;
  }
  bool reads_the_gpu() const { return reads_the_gpu_; }

 private:
  std::optional<at::Tensor> convert(const at::Tensor& tensor, Argument kind) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) return convert_of_host(tensor);
    if (!is_on_gpu(tensor)) return std::nullopt;
    reads_the_gpu_ = true;
    if (shadow_.read_numbers == 0) shadow_.read_numbers = tensor.numel();
    if (shadow_.is_uniform) return convert_uniform(tensor, kind);
    if (span_of(tensor).bytes > shadow_.most_bytes) return std::nullopt;
    if (kind == Argument::overwritten || is_known(tensor)) return mirror(tensor);
    if (!may_guess(tensor)) return std::nullopt;
    return guess(tensor, mirror(tensor));
  }
  std::optional<at::Tensor> convert_of_host(const at::Tensor& tensor) const {
    if (shadow_.is_uniform && tensor.numel() != 1) return std::nullopt;
    return tensor.is_cpu() && tensor.nbytes() <= shadow_.most_bytes ? std::optional(tensor) : std::nullopt;
  }
  std::optional<at::Tensor> convert_uniform(const at::Tensor& tensor, Argument kind) {
    if (kind == Argument::overwritten) return one_number(tensor);
    auto found = find_uniform_value(tensor);
    if (!found || (!found->is_known && !may_guess(tensor))) return std::nullopt;
    // Numbers of the host that were not kept are not all the same, and two places of them seldom are.
    if (found->is_dropped && shadow_.rules->compares) found->number.fill_(++dropped_);
    return found->is_known ? found->number : guess(tensor, found->number);
  }
  /// Truths may have been guessed at before.
  at::Tensor guess(const at::Tensor& tensor, at::Tensor zeros) const {
    return guesses_ones_ && tensor.scalar_type() != at::kBool ? zeros.fill_(1) : zeros;
  }
  /// Notes that the result will be a guess.
  bool may_guess(const at::Tensor& tensor) {
    shadow_.is_known = false;
    return is_whole_number(tensor) || shadow_.rules->answers;
  }
  bool add_list(const std::vector<at::Tensor>& tensors, Argument kind) {
    c10::List<at::Tensor> copies;
    for (const at::Tensor& tensor : tensors) {
      const auto copy = shadow_.is_uniform ? std::nullopt : convert(tensor, kind);
      if (!copy) return false;
      copies.push_back(*copy);
    }
    shadow_.arguments.emplace_back(std::move(copies));
    return true;
  }
  bool add_optional_list(c10::ArrayRef<c10::IValue> values, Argument kind) {
    c10::List<std::optional<at::Tensor>> copies;
    for (const c10::IValue& value : values) {
      const auto copy = convert(value.isTensor() ? value.toTensor() : at::Tensor(), kind);
      if (!copy || shadow_.is_uniform) return false;
      copies.push_back(copy->defined() ? copy : std::nullopt);
    }
    shadow_.arguments.emplace_back(std::move(copies));
    return true;
  }

  CpuShadowCall& shadow_;
  const bool guesses_ones_;
  bool reads_the_gpu_ = false;
  int dropped_ = 0;
};

/// What most calls fail at, looked at before anything is made: not for large tensors, which may be uniform.
bool may_have_shadow_call(const OperatorRules& rules, c10::ArrayRef<const c10::IValue> inputs, bool& is_large) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].isTensor()) continue;
    const at::Tensor& tensor = inputs[i].toTensor();
    if (!tensor.defined() || !tensor.is_cuda()) continue;
    if (at::isTensorSubclassLike(tensor)) return false;
    const bool is_larger = span_of(tensor).bytes > most_bytes(rules);
    is_large = is_large || is_larger;
    if (is_larger && !rules.takes_uniform_values && rules.asks == OperatorRules::Asks::nothing) return false;
    if (rules.arguments[i] == Argument::overwritten || is_larger) continue;
    if (!rules.answers && !is_whole_number(tensor) && !is_known(tensor)) return false;
  }
  return true;
}

}  // namespace

std::unique_ptr<CpuShadowCall> make_shadow_call(OperatorRules& rules, c10::ArrayRef<const c10::IValue> inputs,
                                                bool guesses_ones) {
  bool is_large = false;
  if (inputs.size() != rules.arguments.size() || !may_have_shadow_call(rules, inputs, is_large)) return nullptr;
  auto shadow = std::make_unique<CpuShadowCall>();
  shadow->rules = &rules;
  shadow->is_uniform = is_large;
  shadow->most_bytes = most_bytes(rules);
  ShadowCallMaker maker(*shadow, guesses_ones);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!maker.add(inputs[i], rules.arguments[i])) return nullptr;
  }
  return maker.reads_the_gpu() ? std::move(shadow) : nullptr;
}

bool run(CpuShadowCall& shadow) try {
  const at::DisableRecordFunctionGuard no_ops;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  shadow.rules->handle->callBoxed(shadow.arguments);
  return true;
} catch (const std::exception&) {
  shadow.rules->is_computable = false;  // not on this CPU
  return false;
}

}  // namespace oomdiag
