// Small things are computed. Kernels do nothing; but programs decide by small tensors what to do next: whether all
// sequences have ended, how long the longest object is, whether a number is finite. Where the host wrote what an
// elementwise operator, a reduction or a concatenation reads, the same operator runs on the CPU too, and its result becomes
// the contents of the result on the card. What kernels are seen to write otherwise is forgotten.
//
//   x = torch.tensor([3, 1]).cuda()     contents from the host
//   x.max()                             the kernel does nothing; the CPU's 3 is put in its place
//   y = model(x)                        not known
//   (y == 2).any()                      a guess
//
// A guess: truth values and whole numbers are computed from zeros where contents are not known, which is as what the card
// holds reads. Who reads a guess is told that it came from a kernel.
//
// It is done by an observer of operators (ATen/record_function.h), as profilers are, and changes nothing on the card: the
// operator's own work and allocations are as before.

#include "extension/virtual_device/torch/compute.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <exception>
#include <memory>
#include <optional>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/torch/operators.h"

namespace oomdiag {
namespace {

using Argument = OperatorRules::Argument;

constexpr size_t kMostBytes = 64 << 10;
constexpr size_t kMostCopiedBytes = 4 << 20;  // as much as is kept of one copy (driver/contents.h)

size_t most_bytes(const OperatorRules& rules) { return rules.copies ? kMostCopiedBytes : kMostBytes; }

/// The bytes from a tensor's first element to its last.
struct Span {
  void* begin = nullptr;
  size_t bytes = 0;
};

Span span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {const_cast<void*>(tensor.const_data_ptr()), static_cast<size_t>(last + 1) * tensor.element_size()};
}

bool is_on_card(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && !at::isTensorSubclassLike(tensor) && tensor.has_storage() &&
         !tensor.is_conj() && !tensor.is_neg() && (tensor.numel() == 0 || tensor.const_data_ptr());
}

bool is_known(const at::Tensor& tensor) {
  const Span span = span_of(tensor);
  return span.bytes == 0 || oomdiag_device_knows(span.begin, span.bytes);
}

/// A tensor of the CPU with the same sizes, strides and contents, zeros for what is not known.
at::Tensor mirror(const at::Tensor& tensor) {
  const Span span = span_of(tensor);
  const at::Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (span.bytes) oomdiag_device_peek(copy.mutable_data_ptr(), span.begin, span.bytes);
  return copy;
}

bool is_whole_number(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

/// A call on the CPU with the contents that the inputs had when the real one began.
struct Twin : at::ObserverContext {
  OperatorRules* rules = nullptr;
  torch::jit::Stack arguments{};
  bool is_known = true;
  size_t most_bytes = 0;
};

class TwinMaker {
 public:
  explicit TwinMaker(Twin& twin) : twin_(twin) {}

  /// False if the argument is too large or not plain.
  bool add(const c10::IValue& value, Argument kind) {
    if (value.isTensor()) {
      const auto copy = convert(value.toTensor(), kind);
      if (copy) twin_.arguments.emplace_back(*copy);
      return copy.has_value();
    }
    if (value.isTensorList()) return add_list(value.toTensorVector(), kind);
    if (value.isList() && value.toListRef().size() > 0 &&
        (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone()))
      return add_optional_list(value.toListRef(), kind);
    twin_.arguments.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value);
    return true;
  }
  bool has_met_the_card() const { return has_met_the_card_; }

 private:
  std::optional<at::Tensor> convert(const at::Tensor& tensor, Argument kind) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda())
      return tensor.is_cpu() && tensor.nbytes() <= twin_.most_bytes ? std::optional(tensor) : std::nullopt;
    if (!is_on_card(tensor) || span_of(tensor).bytes > twin_.most_bytes) return std::nullopt;
    has_met_the_card_ = true;
    if (kind != Argument::overwritten && !is_known(tensor)) {
      if (!is_whole_number(tensor) && !twin_.rules->answers) return std::nullopt;
      twin_.is_known = false;
    }
    return mirror(tensor);
  }
  bool add_list(const std::vector<at::Tensor>& tensors, Argument kind) {
    c10::List<at::Tensor> copies;
    for (const at::Tensor& tensor : tensors) {
      const auto copy = convert(tensor, kind);
      if (!copy) return false;
      copies.push_back(*copy);
    }
    twin_.arguments.emplace_back(std::move(copies));
    return true;
  }
  bool add_optional_list(c10::ArrayRef<c10::IValue> values, Argument kind) {
    c10::List<std::optional<at::Tensor>> copies;
    for (const c10::IValue& value : values) {
      const auto copy = convert(value.isTensor() ? value.toTensor() : at::Tensor(), kind);
      if (!copy) return false;
      copies.push_back(copy->defined() ? copy : std::nullopt);
    }
    twin_.arguments.emplace_back(std::move(copies));
    return true;
  }

  Twin& twin_;
  bool has_met_the_card_ = false;
};

void forget(const at::Tensor& tensor) {
  if (!is_on_card(tensor)) return;
  const Span span = span_of(tensor);
  if (span.bytes) oomdiag_device_forget(span.begin, span.bytes);
}

void forget_written(const OperatorRules& rules, c10::ArrayRef<const c10::IValue> inputs) {
  for (size_t i = 0; i < inputs.size() && i < rules.arguments.size(); ++i) {
    if (rules.arguments[i] == Argument::read) continue;
    if (inputs[i].isTensor()) forget(inputs[i].toTensor());
    if (!inputs[i].isTensorList()) continue;
    for (const at::Tensor& tensor : inputs[i].toTensorVector()) forget(tensor);
  }
}

/// What most calls fail at, looked at before anything is made.
bool may_have_twin(const OperatorRules& rules, c10::ArrayRef<const c10::IValue> inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].isTensor() || rules.arguments[i] == Argument::overwritten) continue;
    const at::Tensor& tensor = inputs[i].toTensor();
    if (!tensor.defined() || !tensor.is_cuda()) continue;
    if (at::isTensorSubclassLike(tensor) || span_of(tensor).bytes > most_bytes(rules)) return false;
    if (!rules.answers && !is_whole_number(tensor) && !is_known(tensor)) return false;
  }
  return true;
}

std::unique_ptr<Twin> make_twin(OperatorRules& rules, c10::ArrayRef<const c10::IValue> inputs) {
  if (inputs.size() != rules.arguments.size() || !may_have_twin(rules, inputs)) return nullptr;
  auto twin = std::make_unique<Twin>();
  twin->rules = &rules;
  twin->most_bytes = most_bytes(rules);
  TwinMaker maker(*twin);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!maker.add(inputs[i], rules.arguments[i])) return nullptr;
  }
  return maker.has_met_the_card() ? std::move(twin) : nullptr;
}

std::unique_ptr<at::ObserverContext> at_start(const at::RecordFunction& call) try {
  OperatorRules& rules = find_rules(call);
  if (!rules.handle || (!rules.is_computable && !rules.changes_contents)) return nullptr;
  const at::DisableRecordFunctionGuard no_ops;
  const auto inputs = call.inputs();
  if (rules.is_computable && !c10::impl::dispatch_mode_enabled()) {
    if (auto twin = make_twin(rules, inputs)) return twin;
  }
  forget_written(rules, inputs);
  return nullptr;
} catch (const std::exception&) {
  return nullptr;
}

/// Gives `there`, on the card, the contents of `here`.
void put(const at::Tensor& there, const at::Tensor& here, const Twin& twin) {
  if (!is_on_card(there) || there.sizes() != here.sizes() || there.scalar_type() != here.scalar_type()) return;
  const bool is_guess = !twin.is_known;
  if (is_guess && !is_whole_number(here)) return forget(there);
  const Span span = span_of(there);
  if (span.bytes == 0 || span.bytes > twin.most_bytes) return;
  if (!there.is_non_overlapping_and_dense() && !is_known(there)) return forget(there);
  const at::Tensor whole = mirror(there);
  whole.copy_(here);
  if (is_guess) {
    oomdiag_device_guess(span.begin, whole.const_data_ptr(), span.bytes);
  } else {
    oomdiag_device_copy(span.begin, whole.const_data_ptr(), span.bytes);
  }
}

void put_all(const std::vector<c10::IValue>& there, const torch::jit::Stack& here, const Twin& twin) {
  for (size_t i = 0; i < there.size() && i < here.size(); ++i) {
    if (there[i].isTensor() && here[i].isTensor()) put(there[i].toTensor(), here[i].toTensor(), twin);
  }
}

/// Small inputs may have large results, and numbers that no host wrote are not guessed at.
bool is_worth_computing(const Twin& twin, const std::vector<c10::IValue>& results) {
  if (!twin.rules->is_computable) return false;
  bool may_guess = false;
  for (const c10::IValue& result : results) {
    if (!result.isTensor() || !result.toTensor().defined() || result.toTensor().nbytes() > twin.most_bytes)
      return false;
    may_guess |= is_whole_number(result.toTensor());
  }
  return twin.is_known || may_guess;
}

void compute(Twin& twin, const std::vector<c10::IValue>& results) try {
  const at::DisableRecordFunctionGuard no_ops;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  twin.rules->handle->callBoxed(twin.arguments);
  put_all(results, twin.arguments, twin);
} catch (const std::exception&) {
  twin.rules->is_computable = false;  // not on this CPU
}

void at_end(const at::RecordFunction& call, at::ObserverContext* context) {
  if (!context) return;
  Twin& twin = *static_cast<Twin*>(context);
  if (is_worth_computing(twin, call.outputs())) return compute(twin, call.outputs());
  if (!twin.rules->changes_contents) return;
  for (const c10::IValue& result : call.outputs()) {
    if (result.isTensor()) forget(result.toTensor());
  }
}

}  // namespace

void start_computing() {
  if (!oomdiag_device_keeps_contents()) return;
  auto callback = at::RecordFunctionCallback(at_start, at_end);
  callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION});
  at::addGlobalCallback(callback);
}

}  // namespace oomdiag
