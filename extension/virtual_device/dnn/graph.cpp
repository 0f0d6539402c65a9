#include "extension/virtual_device/dnn/graph.h"

#include "extension/virtual_device/dnn/amount.h"
#include "extension/virtual_device/dnn/real.h"

namespace oomdiag {
namespace {

Sizes widen(const std::vector<int>& values, int count) { return {values.begin(), values.begin() + count}; }

}  // namespace

Tensor read_tensor(cudnnTensorDescriptor_t descriptor) {
  Tensor tensor;
  int count = 0;
  std::vector<int> sizes(CUDNN_DIM_MAX), strides(CUDNN_DIM_MAX);
  OOMDIAG_REAL(cudnnGetTensorNdDescriptor)
  (descriptor, CUDNN_DIM_MAX, &tensor.type, &count, sizes.data(), strides.data());
  tensor.sizes = widen(sizes, count);
  tensor.strides = widen(strides, count);
  return tensor;
}

Tensor read_filter(cudnnFilterDescriptor_t descriptor) {
  Tensor tensor;
  int count = 0;
  cudnnTensorFormat_t format{};
  std::vector<int> sizes(CUDNN_DIM_MAX);
  OOMDIAG_REAL(cudnnGetFilterNdDescriptor)
  (descriptor, CUDNN_DIM_MAX, &tensor.type, &format, &count, sizes.data());
  tensor.sizes = widen(sizes, count);
  tensor.strides.assign(tensor.sizes.size(), 1);
  // Innermost first; channels are innermost in NHWC.
  std::vector<size_t> order;
  if (format == CUDNN_TENSOR_NHWC) order.push_back(1);
  for (size_t axis = tensor.sizes.size(); axis-- > 0;) {
    if (axis != 1 || format != CUDNN_TENSOR_NHWC) order.push_back(axis);
  }
  int64_t stride = 1;
  for (const size_t axis : order) {
    tensor.strides[axis] = stride;
    stride *= tensor.sizes[axis];
  }
  return tensor;
}

bool describe(Descriptor& descriptor, const Tensor& tensor, int64_t id) {
  constexpr int64_t kAlignment = 16;
  return descriptor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, tensor.type)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, tensor.sizes)
      .set(CUDNN_ATTR_TENSOR_STRIDES, tensor.strides)
      .set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id)
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment)
      .finalize();
}

bool describe(Descriptor& descriptor, cudnnConvolutionDescriptor_t convolution) {
  int count = 0;
  std::vector<int> padding(CUDNN_DIM_MAX), stride(CUDNN_DIM_MAX), dilation(CUDNN_DIM_MAX);
  cudnnConvolutionMode_t mode{};
  cudnnDataType_t type{};
  OOMDIAG_REAL(cudnnGetConvolutionNdDescriptor)
  (convolution, CUDNN_DIM_MAX - 2, &count, padding.data(), stride.data(), dilation.data(), &mode, &type);
  return descriptor.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, int64_t{count})
      .set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, type)
      .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, mode)
      .set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, widen(padding, count))
      .set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, widen(padding, count))
      .set(CUDNN_ATTR_CONVOLUTION_DILATIONS, widen(dilation, count))
      .set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, widen(stride, count))
      .finalize();
}

int64_t find_workspace(const Descriptor& graph) {
  Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  const bool is_ready = heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
                            .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_INSTANT)
                            .finalize();
  Descriptor configuration(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  cudnnBackendDescriptor_t first = configuration.get();
  int64_t count = 0;
  if (!is_ready || OOMDIAG_REAL(cudnnBackendGetAttribute)(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                                          CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &first)) {
    return 0;
  }
  Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  cudnnHandle_t none = nullptr;  // its place is taken by the description of the GPU
  int64_t bytes = 0;
  if (count > 0 && plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)
                       .set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, none)
                       .finalize()) {
    OOMDIAG_REAL(cudnnBackendGetAttribute)
    (plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count, &bytes);
  }
  return bytes;
}

}  // namespace oomdiag
