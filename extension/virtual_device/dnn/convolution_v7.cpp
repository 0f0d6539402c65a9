// Convolutions by the old API (TORCH_CUDNN_V8_API_DISABLED=1): algorithms have numbers, and a handle is asked for the
// workspace of each. The real library answers only for a graph, without a device; so the same convolution is written
// down as a graph, and the workspace is that of the first plan of cuDNN's heuristics for the GPU. That plan and the
// algorithm that the old API would choose need not be the same: the answer is noted as an estimate. The functions are rows of
// entry_points.txt.

#include <cudnn.h>

#include "extension/virtual_device/dnn/amount.h"
#include "extension/virtual_device/dnn/forward.h"
#include "extension/virtual_device/dnn/graph.h"
#include "extension/virtual_device/driver/device.h"

namespace oomdiag {
namespace {

/// The operation of each pass and its attributes: x, w, y, the convolution, alpha, beta.
struct PassNames {
  cudnnBackendDescriptorType_t operation;
  cudnnBackendAttributeName_t x, w, y, convolution, alpha, beta;
};
/// By Pass.
constexpr PassNames kPasses[] = {
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}};

}  // namespace

size_t estimate(Pass pass, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y) {
  oomdiag_device_note("estimate", "workspace of cuDNN's v7 convolutions");
  const PassNames& names = kPasses[static_cast<size_t>(pass)];
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

cudnnStatus_t convolve(cudnnHandle_t handle, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                       cudnnTensorDescriptor_t y) {
  const Tensor filter = read_filter(w);
  const Tensor output = read_tensor(y);
  Amount amount{.flops = count_convolution_flops(filter, output)};
  for (const auto& tensor : {read_tensor(x), filter, output}) amount += count_bytes(tensor);
  return submit_work(handle, amount);
}

size_t count_dropout_bytes() {
  constexpr size_t kStateBytes = 16;
  int ordinal = 0;
  int multiprocessors = 0;
  int threads = 0;
  cudaGetDevice(&ordinal);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, ordinal);
  return static_cast<size_t>(multiprocessors) * static_cast<size_t>(threads) * kStateBytes;
}

}  // namespace oomdiag
