// Sizes that the old, handle-taking API of cuDNN gives out, and that the real library does not give without a device.
// Each is an estimate and noted as one, except where it follows from a definition.

#include <cudnn.h>

#include "extension/virtual_device/dnn/handle.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::give_estimate;

// Batch normalisation: 0 agreed with a recording from a real GPU (fp32, NCHW); other modes are
// not known.

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* bytes) {
  return give_estimate("cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize", bytes, 0);
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t* bytes) {
  return give_estimate("cudnnGetBatchNormalizationBackwardExWorkspaceSize", bytes, 0);
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnActivationDescriptor_t,
    const cudnnTensorDescriptor_t, size_t* bytes) {
  return give_estimate("cudnnGetBatchNormalizationTrainingExReserveSpaceSize", bytes, 0);
}

/// A generator's state, 16 bytes, for each thread that the GPU holds at once.
OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* bytes) {
  constexpr size_t kStateBytes = 16;
  int ordinal = 0;
  int multiprocessors = 0;
  int threads = 0;
  cudaGetDevice(&ordinal);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, ordinal);
  return give_estimate("cudnnDropoutGetStatesSize", bytes,
                       static_cast<size_t>(multiprocessors) * static_cast<size_t>(threads) * kStateBytes);
}

constexpr size_t kCtcBytes = 1 << 20;

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetCTCLossWorkspaceSize(cudnnHandle_t, const cudnnTensorDescriptor_t,
                                                               const cudnnTensorDescriptor_t, const int*, const int*,
                                                               const int*, cudnnCTCLossAlgo_t, cudnnCTCLossDescriptor_t,
                                                               size_t* bytes) {
  return give_estimate("cudnnGetCTCLossWorkspaceSize", bytes, kCtcBytes);
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnGetCTCLossWorkspaceSize_v8(cudnnHandle_t, cudnnCTCLossAlgo_t,
                                                                  cudnnCTCLossDescriptor_t,
                                                                  const cudnnTensorDescriptor_t,
                                                                  const cudnnTensorDescriptor_t, size_t* bytes) {
  return give_estimate("cudnnGetCTCLossWorkspaceSize_v8", bytes, kCtcBytes);
}

// These two take their handle second, so that no generated stub covers them. The descriptor stays as created: nothing
// reads it.

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnSetDropoutDescriptor(cudnnDropoutDescriptor_t, cudnnHandle_t, float, void*,
                                                            size_t, unsigned long long) {
  return CUDNN_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cudnnStatus_t cudnnRestoreDropoutDescriptor(cudnnDropoutDescriptor_t, cudnnHandle_t, float, void*,
                                                                size_t, unsigned long long) {
  return CUDNN_STATUS_SUCCESS;
}
