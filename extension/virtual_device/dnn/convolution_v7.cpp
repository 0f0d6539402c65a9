// Convolutions by the old API (TORCH_CUDNN_V8_API_DISABLED=1): algorithms have numbers, and a handle is asked for the
// workspace of each. The real library answers only for a graph, without a device; so the same convolution is written
// down as a graph, and the workspace is that of the first plan of cuDNN's heuristics for the card. That plan and the
// algorithm that the old API would choose need not be the same: the answer is noted as an estimate.

#include <cudnn.h>

#include <vector>

#include "extension/virtual_device/dnn/handle.h"
#include "extension/virtual_device/dnn/real.h"
#include "extension/virtual_device/driver/device.h"

namespace {

using Sizes = std::vector<int64_t>;

enum class Pass { forward, backward_data, backward_filter };

/// A tensor as the old API describes it: a filter has a layout in place of strides.
struct Tensor {
  cudnnDataType_t type{};
  Sizes sizes, strides;
};

/// Owns a descriptor of the graph API; null once anything failed.
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    if (cudnnBackendCreateDescriptor(type, &descriptor_)) descriptor_ = nullptr;
  }
  ~Descriptor() {
    if (descriptor_) cudnnBackendDestroyDescriptor(descriptor_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  template <typename Value>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value& value) {
    return set(name, type, 1, &value);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Sizes& sizes) {
    return set(name, CUDNN_TYPE_INT64, static_cast<int64_t>(sizes.size()), sizes.data());
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other.descriptor_);
  }
  /// Whether all that was set was accepted.
  bool finalize() { return is_good_ && descriptor_ && !cudnnBackendFinalize(descriptor_); }
  cudnnBackendDescriptor_t get() const { return descriptor_; }

 private:
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
                  const void* values) {
    is_good_ = is_good_ && descriptor_ && !cudnnBackendSetAttribute(descriptor_, name, type, count, values);
    return *this;
  }

  cudnnBackendDescriptor_t descriptor_ = nullptr;
  bool is_good_ = true;
};

Sizes widen(const std::vector<int>& values, int count) { return {values.begin(), values.begin() + count}; }

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

/// The operation of each pass and its attributes: x, w, y, the convolution, alpha, beta.
struct PassNames {
  cudnnBackendDescriptorType_t operation;
  cudnnBackendAttributeName_t x, w, y, convolution, alpha, beta;
};
PassNames names_of(Pass pass) {
  switch (pass) {
    case Pass::forward:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
    case Pass::backward_data:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
    case Pass::backward_filter:
      break;
  }
  return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
}

/// The workspace of the first plan that cuDNN's heuristics give for `graph` and that can be made; 0 if there is none.
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
  cudnnHandle_t none = nullptr;  // its place is taken by the description of the card
  int64_t bytes = 0;
  if (count > 0 && plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)
                       .set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, none)
                       .finalize()) {
    OOMDIAG_REAL(cudnnBackendGetAttribute)
    (plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count, &bytes);
  }
  return bytes;
}

size_t estimate(Pass pass, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y) {
  oomdiag_device_note("estimate", "workspace of cuDNN's v7 convolutions");
  const PassNames names = names_of(pass);
  Descriptor x_tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  Descriptor w_tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  Descriptor y_tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  Descriptor shape(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  Descriptor operation(names.operation);
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  const bool is_described = describe(x_tensor, read_tensor(x), 'x') && describe(w_tensor, read_filter(w), 'w') &&
                            describe(y_tensor, read_tensor(y), 'y') && describe(shape, convolution);
  const bool is_graph = is_described && operation.set(names.x, x_tensor)
                                            .set(names.w, w_tensor)
                                            .set(names.y, y_tensor)
                                            .set(names.convolution, shape)
                                            .set(names.alpha, CUDNN_TYPE_DOUBLE, 1.0)
                                            .set(names.beta, CUDNN_TYPE_DOUBLE, 0.0)
                                            .finalize();
  if (!is_graph || !graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation).finalize()) return 0;
  return static_cast<size_t>(find_workspace(graph));
}

/// One algorithm is offered, number 1 of each kind: PyTorch's own default.
template <typename Algorithm, typename Performance>
cudnnStatus_t offer(size_t workspace_bytes, cudnnConvolutionDescriptor_t convolution, int wanted, int* given,
                    Performance* performances) {
  *given = wanted > 0;
  if (!*given) return CUDNN_STATUS_SUCCESS;
  performances[0] = {};
  performances[0].algo = static_cast<Algorithm>(1);
  performances[0].time = 1;
  performances[0].memory = workspace_bytes;
  performances[0].determinism = CUDNN_DETERMINISTIC;
  return OOMDIAG_REAL(cudnnGetConvolutionMathType)(convolution, &performances[0].mathType);
}

}  // namespace

#define OOMDIAG_FORWARD cudnnConvolutionFwdAlgo_t, cudnnConvolutionFwdAlgoPerf_t
#define OOMDIAG_DATA cudnnConvolutionBwdDataAlgo_t, cudnnConvolutionBwdDataAlgoPerf_t
#define OOMDIAG_FILTER cudnnConvolutionBwdFilterAlgo_t, cudnnConvolutionBwdFilterAlgoPerf_t

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t, cudnnTensorDescriptor_t x,
                                                                          cudnnFilterDescriptor_t w,
                                                                          cudnnConvolutionDescriptor_t convolution,
                                                                          cudnnTensorDescriptor_t y,
                                                                          cudnnConvolutionFwdAlgo_t, size_t* bytes) {
  *bytes = estimate(Pass::forward, x, w, convolution, y);
  return CUDNN_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(
    cudnnHandle_t, cudnnFilterDescriptor_t w, cudnnTensorDescriptor_t dy, cudnnConvolutionDescriptor_t convolution,
    cudnnTensorDescriptor_t dx, cudnnConvolutionBwdDataAlgo_t, size_t* bytes) {
  *bytes = estimate(Pass::backward_data, dx, w, convolution, dy);
  return CUDNN_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(
    cudnnHandle_t, cudnnTensorDescriptor_t x, cudnnTensorDescriptor_t dy, cudnnConvolutionDescriptor_t convolution,
    cudnnFilterDescriptor_t dw, cudnnConvolutionBwdFilterAlgo_t, size_t* bytes) {
  *bytes = estimate(Pass::backward_filter, x, dw, convolution, dy);
  return CUDNN_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(
    cudnnHandle_t, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w, cudnnConvolutionDescriptor_t convolution,
    cudnnTensorDescriptor_t y, int wanted, int* given, cudnnConvolutionFwdAlgoPerf_t* performances) {
  return offer<OOMDIAG_FORWARD>(estimate(Pass::forward, x, w, convolution, y), convolution, wanted, given,
                                performances);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(
    cudnnHandle_t, cudnnFilterDescriptor_t w, cudnnTensorDescriptor_t dy, cudnnConvolutionDescriptor_t convolution,
    cudnnTensorDescriptor_t dx, int wanted, int* given, cudnnConvolutionBwdDataAlgoPerf_t* performances) {
  return offer<OOMDIAG_DATA>(estimate(Pass::backward_data, dx, w, convolution, dy), convolution, wanted, given,
                             performances);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    cudnnHandle_t, cudnnTensorDescriptor_t x, cudnnTensorDescriptor_t dy, cudnnConvolutionDescriptor_t convolution,
    cudnnFilterDescriptor_t dw, int wanted, int* given, cudnnConvolutionBwdFilterAlgoPerf_t* performances) {
  return offer<OOMDIAG_FILTER>(estimate(Pass::backward_filter, x, dw, convolution, dy), convolution, wanted, given,
                               performances);
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnFindConvolutionForwardAlgorithmEx(
    cudnnHandle_t, cudnnTensorDescriptor_t x, const void*, cudnnFilterDescriptor_t w, const void*,
    cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y, void*, int wanted, int* given,
    cudnnConvolutionFwdAlgoPerf_t* performances, void*, size_t) {
  return offer<OOMDIAG_FORWARD>(estimate(Pass::forward, x, w, convolution, y), convolution, wanted, given,
                                performances);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnFindConvolutionBackwardDataAlgorithmEx(
    cudnnHandle_t, cudnnFilterDescriptor_t w, const void*, cudnnTensorDescriptor_t dy, const void*,
    cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t dx, void*, int wanted, int* given,
    cudnnConvolutionBwdDataAlgoPerf_t* performances, void*, size_t) {
  return offer<OOMDIAG_DATA>(estimate(Pass::backward_data, dx, w, convolution, dy), convolution, wanted, given,
                             performances);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnFindConvolutionBackwardFilterAlgorithmEx(
    cudnnHandle_t, cudnnTensorDescriptor_t x, const void*, cudnnTensorDescriptor_t dy, const void*,
    cudnnConvolutionDescriptor_t convolution, cudnnFilterDescriptor_t dw, void*, int wanted, int* given,
    cudnnConvolutionBwdFilterAlgoPerf_t* performances, void*, size_t) {
  return offer<OOMDIAG_FILTER>(estimate(Pass::backward_filter, x, dw, convolution, dy), convolution, wanted, given,
                               performances);
}
