// Convolutions by the old API (TORCH_CUDNN_V8_API_DISABLED=1): algorithms have numbers, and a handle is asked for the
// workspace of each. The real library answers only for a graph, without a device; so the same convolution is written
// down as a graph, and the workspace is that of the first plan of cuDNN's heuristics for the GPU. That plan and the
// algorithm that the old API would choose need not be the same: the answer is noted as an estimate.

#include <cudnn.h>

#include "extension/virtual_device/dnn/amount.h"
#include "extension/virtual_device/dnn/graph.h"
#include "extension/virtual_device/dnn/handle.h"
#include "extension/virtual_device/dnn/real.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::Descriptor;

namespace {

enum class Pass { forward, backward_data, backward_filter };

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
  const bool is_described = describe(x_tensor, oomdiag::read_tensor(x), 'x') &&
                            describe(w_tensor, oomdiag::read_filter(w), 'w') &&
                            describe(y_tensor, oomdiag::read_tensor(y), 'y') && describe(shape, convolution);
  const bool is_graph = is_described && operation.set(names.x, x_tensor)
                                            .set(names.w, w_tensor)
                                            .set(names.y, y_tensor)
                                            .set(names.convolution, shape)
                                            .set(names.alpha, CUDNN_TYPE_DOUBLE, 1.0)
                                            .set(names.beta, CUDNN_TYPE_DOUBLE, 0.0)
                                            .finalize();
  if (!is_graph || !graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation).finalize()) return 0;
  return static_cast<size_t>(oomdiag::find_workspace(graph));
}

/// The convolution itself, whichever of the three is its result.
cudnnStatus_t convolve(cudnnHandle_t handle, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                       cudnnTensorDescriptor_t y) {
  const oomdiag::Tensor filter = oomdiag::read_filter(w);
  const oomdiag::Tensor output = oomdiag::read_tensor(y);
  oomdiag::Amount amount{.flops = oomdiag::count_convolution_flops(filter, output)};
  for (const auto& tensor : {oomdiag::read_tensor(x), filter, output}) amount += oomdiag::count_bytes(tensor);
  return oomdiag::submit_work(handle, amount);
}

/// One algorithm is offered, number 1 of each kind: PyTorch's own default.
template <typename Algorithm, typename Performance>
cudnnStatus_t offer(size_t workspace_bytes, cudnnConvolutionDescriptor_t convolution, int requested, int* given,
                    Performance* performances) {
  *given = requested > 0;
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
    cudnnTensorDescriptor_t y, int requested, int* given, cudnnConvolutionFwdAlgoPerf_t* performances) {
  return offer<OOMDIAG_FORWARD>(estimate(Pass::forward, x, w, convolution, y), convolution, requested, given,
                                performances);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(
    cudnnHandle_t, cudnnFilterDescriptor_t w, cudnnTensorDescriptor_t dy, cudnnConvolutionDescriptor_t convolution,
    cudnnTensorDescriptor_t dx, int requested, int* given, cudnnConvolutionBwdDataAlgoPerf_t* performances) {
  return offer<OOMDIAG_DATA>(estimate(Pass::backward_data, dx, w, convolution, dy), convolution, requested, given,
                             performances);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    cudnnHandle_t, cudnnTensorDescriptor_t x, cudnnTensorDescriptor_t dy, cudnnConvolutionDescriptor_t convolution,
    cudnnFilterDescriptor_t dw, int requested, int* given, cudnnConvolutionBwdFilterAlgoPerf_t* performances) {
  return offer<OOMDIAG_FILTER>(estimate(Pass::backward_filter, x, dw, convolution, dy), convolution, requested, given,
                               performances);
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnFindConvolutionForwardAlgorithmEx(
    cudnnHandle_t, cudnnTensorDescriptor_t x, const void*, cudnnFilterDescriptor_t w, const void*,
    cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y, void*, int requested, int* given,
    cudnnConvolutionFwdAlgoPerf_t* performances, void*, size_t) {
  return offer<OOMDIAG_FORWARD>(estimate(Pass::forward, x, w, convolution, y), convolution, requested, given,
                                performances);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnFindConvolutionBackwardDataAlgorithmEx(
    cudnnHandle_t, cudnnFilterDescriptor_t w, const void*, cudnnTensorDescriptor_t dy, const void*,
    cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t dx, void*, int requested, int* given,
    cudnnConvolutionBwdDataAlgoPerf_t* performances, void*, size_t) {
  return offer<OOMDIAG_DATA>(estimate(Pass::backward_data, dx, w, convolution, dy), convolution, requested, given,
                             performances);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnFindConvolutionBackwardFilterAlgorithmEx(
    cudnnHandle_t, cudnnTensorDescriptor_t x, const void*, cudnnTensorDescriptor_t dy, const void*,
    cudnnConvolutionDescriptor_t convolution, cudnnFilterDescriptor_t dw, void*, int requested, int* given,
    cudnnConvolutionBwdFilterAlgoPerf_t* performances, void*, size_t) {
  return offer<OOMDIAG_FILTER>(estimate(Pass::backward_filter, x, dw, convolution, dy), convolution, requested, given,
                               performances);
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t handle, const void*, cudnnTensorDescriptor_t x,
                                                          const void*, cudnnFilterDescriptor_t w, const void*,
                                                          cudnnConvolutionDescriptor_t, cudnnConvolutionFwdAlgo_t,
                                                          void*, size_t, const void*, cudnnTensorDescriptor_t y,
                                                          void*) {
  return convolve(handle, x, w, y);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnConvolutionBiasActivationForward(
    cudnnHandle_t handle, const void*, cudnnTensorDescriptor_t x, const void*, cudnnFilterDescriptor_t w, const void*,
    cudnnConvolutionDescriptor_t, cudnnConvolutionFwdAlgo_t, void*, size_t, const void*, cudnnTensorDescriptor_t,
    const void*, cudnnTensorDescriptor_t, const void*, cudnnActivationDescriptor_t, cudnnTensorDescriptor_t y, void*) {
  return convolve(handle, x, w, y);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t handle, const void*,
                                                               cudnnFilterDescriptor_t w, const void*,
                                                               cudnnTensorDescriptor_t dy, const void*,
                                                               cudnnConvolutionDescriptor_t,
                                                               cudnnConvolutionBwdDataAlgo_t, void*, size_t,
                                                               const void*, cudnnTensorDescriptor_t dx, void*) {
  return convolve(handle, dx, w, dy);
}
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t handle, const void*,
                                                                 cudnnTensorDescriptor_t x, const void*,
                                                                 cudnnTensorDescriptor_t dy, const void*,
                                                                 cudnnConvolutionDescriptor_t,
                                                                 cudnnConvolutionBwdFilterAlgo_t, void*, size_t,
                                                                 const void*, cudnnFilterDescriptor_t dw, void*) {
  return convolve(handle, x, dw, dy);
}
