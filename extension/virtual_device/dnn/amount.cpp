#include "extension/virtual_device/dnn/amount.h"

#include <functional>
#include <numeric>

namespace oomdiag {
namespace {

double count_elements(const Tensor& tensor) {
  return std::accumulate(tensor.sizes.begin(), tensor.sizes.end(), 1.0, std::multiplies<>());
}

double element_bytes(cudnnDataType_t type) {
  switch (static_cast<int>(type)) {
    case CUDNN_DATA_DOUBLE:
    case CUDNN_DATA_INT64:
      return 8;
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16:
      return 2;
    case CUDNN_DATA_INT8:
    case CUDNN_DATA_UINT8:
    case CUDNN_DATA_BOOLEAN:
    case CUDNN_DATA_FP8_E4M3:
    case CUDNN_DATA_FP8_E5M2:
      return 1;
    default:
      return 4;
  }
}

/// Half precision runs on tensor cores, by the CUDA programming guide's tables eight times as fast.
double speed(cudnnDataType_t type) { return element_bytes(type) < 4 ? 8 : 1; }

}  // namespace

Amount count_bytes(const Tensor& tensor) {
  return {.memory_bytes = count_elements(tensor) * element_bytes(tensor.type)};
}

double count_convolution_flops(const Tensor& filter, const Tensor& output) {
  if (filter.sizes.empty() || filter.sizes[0] <= 0) return 0;
  const double terms = count_elements(filter) / static_cast<double>(filter.sizes[0]);
  return 2 * count_elements(output) * terms / speed(filter.type);
}

double count_product_flops(const Tensor& first, const Tensor& result) {
  const double terms = first.sizes.empty() ? 0 : static_cast<double>(first.sizes.back());
  return 2 * count_elements(result) * terms / speed(first.type);
}

double count_attention_flops(const Tensor& key, const Tensor& query) {
  const double rows = key.sizes.size() < 2 ? 0 : static_cast<double>(key.sizes[key.sizes.size() - 2]);
  return 4 * count_elements(query) * rows / speed(query.type);
}

}  // namespace oomdiag
