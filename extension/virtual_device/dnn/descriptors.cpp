#include "extension/virtual_device/dnn/descriptors.h"

#include <algorithm>

#include "extension/virtual_device/dnn/amount.h"

namespace oomdiag {

void Descriptors::add(cudnnBackendDescriptor_t descriptor, cudnnBackendDescriptorType_t type) {
  std::lock_guard guard(lock_);
  entries_[descriptor] = {.type = type};
}

void Descriptors::remove(cudnnBackendDescriptor_t descriptor) {
  std::lock_guard guard(lock_);
  entries_.erase(descriptor);
}

cudnnBackendDescriptorType_t Descriptors::type(cudnnBackendDescriptor_t descriptor) const {
  std::lock_guard guard(lock_);
  const auto entry = entries_.find(descriptor);
  return entry == entries_.end() ? CUDNN_BACKEND_TENSOR_DESCRIPTOR : entry->second.type;
}

void Descriptors::set(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t attribute,
                      cudnnBackendAttributeType_t type, int64_t count, const void* elements) {
  std::lock_guard guard(lock_);
  const auto entry = entries_.find(descriptor);
  if (entry == entries_.end() || !elements) return;
  if (entry->second.type == CUDNN_BACKEND_TENSOR_DESCRIPTOR) {
    set_in_tensor(entry->second, attribute, count, elements);
  } else if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    for (const auto part :
         std::span(static_cast<const cudnnBackendDescriptor_t*>(elements), static_cast<size_t>(count))) {
      if (const auto known = entries_.find(part); known != entries_.end())
        add_part(entry->second, attribute, known->second);
    }
  }
}

void Descriptors::pass_on(cudnnBackendDescriptor_t from, std::span<const cudnnBackendDescriptor_t> found) {
  std::lock_guard guard(lock_);
  const auto source = entries_.find(from);
  if (source == entries_.end()) return;
  for (const auto descriptor : found) {
    if (const auto entry = entries_.find(descriptor); entry != entries_.end()) {
      entry->second.amount = source->second.amount;
      entry->second.product = source->second.product;
    }
  }
}

Amount Descriptors::amount(cudnnBackendDescriptor_t descriptor) const {
  std::lock_guard guard(lock_);
  const auto entry = entries_.find(descriptor);
  return entry == entries_.end() ? Amount{} : total(entry->second);
}

std::optional<ConvolutionProduct> Descriptors::product(cudnnBackendDescriptor_t descriptor) const {
  std::lock_guard guard(lock_);
  const auto entry = entries_.find(descriptor);
  return entry == entries_.end() ? std::nullopt : product_of(entry->second);
}

bool Descriptors::is_comparison(cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t tensors) {
  std::lock_guard guard(lock_);
  const auto entry = entries_.find(tensors);
  if (entry == entries_.end()) return false;
  cudnnBackendDescriptor_t& first = entry->second.first_plan;
  if (!first) first = plan;
  return first != plan;
}

void Descriptors::set_in_tensor(Entry& tensor, cudnnBackendAttributeName_t attribute, int64_t count,
                                const void* elements) {
  switch (static_cast<int>(attribute)) {
    case CUDNN_ATTR_TENSOR_DATA_TYPE:
      tensor.tensor.type = *static_cast<const cudnnDataType_t*>(elements);
      return;
    case CUDNN_ATTR_TENSOR_DIMENSIONS:
      tensor.tensor.sizes.assign(static_cast<const int64_t*>(elements), static_cast<const int64_t*>(elements) + count);
      return;
    case CUDNN_ATTR_TENSOR_IS_VIRTUAL:
    case CUDNN_ATTR_TENSOR_IS_BY_VALUE:
      tensor.is_in_memory = tensor.is_in_memory && !*static_cast<const bool*>(elements);
      return;
  }
}

void Descriptors::add_part(Entry& whole, cudnnBackendAttributeName_t attribute, const Entry& part) {
  whole.amount += total(part);
  if (const auto product = product_of(part)) whole.product = product;
  switch (static_cast<int>(attribute)) {
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW:
    case CUDNN_ATTR_OPERATION_MATMUL_ADESC:
    case CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC:
      whole.factor = part.tensor;
      return;
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY:
    case CUDNN_ATTR_OPERATION_MATMUL_CDESC:
    case CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC:
      whole.result = part.tensor;
      return;
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X:
      whole.image = part.tensor;
      return;
  }
}

std::optional<ConvolutionProduct> Descriptors::product_of(const Entry& entry) {
  const bool is_forward = entry.type == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR;
  const bool is_of_weights = entry.type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR;
  const bool is_of_input = entry.type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR;
  if (!is_forward && !is_of_weights && !is_of_input) return entry.product;
  const Sizes &weight = entry.factor.sizes, &output = entry.result.sizes, &image = entry.image.sizes;
  if (weight.size() < 3 || output.size() != weight.size() || image.size() != weight.size()) return std::nullopt;
  if (output[1] != weight[0] || image[1] != weight[1]) return std::nullopt;  // it has groups
  const bool has_strides = !std::equal(image.begin() + 2, image.end(), output.begin() + 2);
  if (is_of_input && has_strides) return std::nullopt;
  int64_t window = 1, places = output[0];
  for (size_t i = 2; i < weight.size(); ++i) {
    window *= weight[i];
    places *= output[i];
  }
  const auto weight_bytes = static_cast<int64_t>(count_bytes(entry.factor).memory_bytes);
  ConvolutionProduct product{.rows = places, .columns = weight[0], .inner = window * weight[1]};
  if (is_of_input) product = {.rows = places, .columns = weight[1], .inner = window * weight[0]};
  if (is_of_weights) product = {.rows = weight[0], .columns = weight[1], .inner = places, .column_blocks = window};
  product.element_bytes = weight_bytes / std::max<int64_t>(1, weight[0] * weight[1] * window);
  product.tensor_bytes = static_cast<int64_t>(entry.amount.memory_bytes) - (window > 1 ? 0 : weight_bytes);
  return product;
}

Amount Descriptors::total(const Entry& entry) {
  Amount amount = entry.amount;
  switch (static_cast<int>(entry.type)) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
      return entry.is_in_memory ? count_bytes(entry.tensor) : Amount{};
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      amount.flops += count_convolution_flops(entry.factor, entry.result);
      break;
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
      amount.flops += count_product_flops(entry.factor, entry.result);
      break;
    case CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR:
      amount.flops += count_attention_flops(entry.factor, entry.result);
      break;
  }
  return amount;
}

}  // namespace oomdiag
