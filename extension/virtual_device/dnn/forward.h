#pragma once

#include <cudnn.h>

#include "extension/virtual_device/dnn/handle.h"
#include "extension/virtual_device/dnn/real.h"
#include "extension/virtual_device/stubs/handle.h"

// What the lines of this library's entry_points.txt call, beside stubs/handle.h.

namespace oomdiag {

enum class Pass { forward, backward_data, backward_filter };

/// The workspace of a convolution, in bytes; noted as an estimate.
size_t estimate(Pass pass, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y);

template <Pass pass>
Success give_workspace(cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w, cudnnConvolutionDescriptor_t convolution,
                       cudnnTensorDescriptor_t y, size_t* bytes) {
  return give(estimate(pass, x, w, convolution, y), bytes);
}

/// One algorithm is offered, number 1 of each kind: PyTorch's own default.
template <Pass pass, typename Performance>
cudnnStatus_t offer(cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w, cudnnConvolutionDescriptor_t convolution,
                    cudnnTensorDescriptor_t y, int requested, int* given, Performance* performance) {
  const size_t workspace_bytes = estimate(pass, x, w, convolution, y);
  *given = requested > 0;
  if (!*given) return CUDNN_STATUS_SUCCESS;
  *performance = {};
  performance->algo = static_cast<decltype(performance->algo)>(1);
  performance->time = 1;
  performance->memory = workspace_bytes;
  performance->determinism = CUDNN_DETERMINISTIC;
  return OOMDIAG_REAL(cudnnGetConvolutionMathType)(convolution, &performance->mathType);
}

/// The convolution itself, whichever of the three is its result.
cudnnStatus_t convolve(cudnnHandle_t handle, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                       cudnnTensorDescriptor_t y);

/// A generator's state for each thread that the GPU holds at once.
size_t count_dropout_bytes();

}  // namespace oomdiag
