#include "extension/virtual_device/torch/spans.h"

#include <ATen/TensorSubclassLikeUtils.h>

#include <vector>

#include "extension/virtual_device/driver/device.h"

namespace oomdiag {

Span span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {const_cast<void*>(tensor.const_data_ptr()), static_cast<size_t>(last + 1) * tensor.element_size()};
}

bool is_on_gpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && !at::isTensorSubclassLike(tensor) && tensor.has_storage() &&
         !tensor.is_conj() && !tensor.is_neg() && (tensor.numel() == 0 || tensor.const_data_ptr());
}

bool is_known(const at::Tensor& tensor) {
  const Span span = span_of(tensor);
  return span.bytes == 0 || oomdiag_device_knows(span.begin, span.bytes);
}

bool is_whole_number(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

at::Tensor mirror(const at::Tensor& tensor) {
  const Span span = span_of(tensor);
  const at::Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (span.bytes) oomdiag_device_peek(copy.mutable_data_ptr(), span.begin, span.bytes);
  return copy;
}

at::Tensor one_number(const at::Tensor& like) {
  const std::vector<int64_t> ones(static_cast<size_t>(like.dim()), 1);
  return at::zeros(ones, like.options().device(at::kCPU));
}

std::optional<UniformValue> find_uniform_value(const at::Tensor& tensor) {
  enum { mixed, known, guess, dropped, unknown };  // oomdiag_device_look
  if (!is_on_gpu(tensor) || tensor.numel() == 0) return std::nullopt;
  const Span span = span_of(tensor);
  UniformValue result{.number = one_number(tensor)};
  alignas(16) char number[16] = {};
  const size_t bytes = tensor.element_size();
  const int found = oomdiag_device_look(span.begin, span.bytes, number, bytes);
  if (found == mixed) return std::nullopt;
  result.is_known = found == known;
  result.is_dropped = found == dropped;
  if (found == known || found == guess) std::memcpy(result.number.mutable_data_ptr(), number, bytes);
  return result;
}

void forget(const at::Tensor& tensor) {
  if (!is_on_gpu(tensor)) return;
  const Span span = span_of(tensor);
  if (span.bytes) oomdiag_device_forget(span.begin, span.bytes);
}

void forget_at_replay(const at::Tensor& tensor) {
  if (!is_on_gpu(tensor)) return;
  const Span span = span_of(tensor);
  if (span.bytes) oomdiag_device_overwritten_at_replay(span.begin, span.bytes);
}

}  // namespace oomdiag
