#include "extension/virtual_device/dnn/descriptors.h"

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
    if (const auto entry = entries_.find(descriptor); entry != entries_.end())
      entry->second.amount = source->second.amount;
  }
}

Amount Descriptors::amount(cudnnBackendDescriptor_t descriptor) const {
  std::lock_guard guard(lock_);
  const auto entry = entries_.find(descriptor);
  return entry == entries_.end() ? Amount{} : total(entry->second);
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
  }
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
