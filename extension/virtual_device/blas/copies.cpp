// Copies of vectors and matrices between the host and the GPU (MAGMA, inside torch_cuda_linalg, makes them). Both ways are
// one copy: the driver knows which side an address is of.

#include <cublas_v2.h>

#include <cstdint>

#include "extension/virtual_device/blas/forward.h"

cublasStatus_t oomdiag::copy_rows(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width,
                                  int64_t count, cudaStream_t stream, bool waits) {
  if (width < 0 || count < 0 || to_pitch < width || from_pitch < width) return CUBLAS_STATUS_INVALID_VALUE;
  const auto size = [](int64_t bytes) { return static_cast<size_t>(bytes); };
  const bool is_dense = to_pitch == width && from_pitch == width;
  cudaError_t error = is_dense ? cudaMemcpyAsync(to, from, size(width * count), cudaMemcpyDefault, stream)
                               : cudaMemcpy2DAsync(to, size(to_pitch), from, size(from_pitch), size(width), size(count),
                                                   cudaMemcpyDefault, stream);
  if (!error && waits) error = cudaStreamSynchronize(stream);
  return error ? CUBLAS_STATUS_MAPPING_ERROR : CUBLAS_STATUS_SUCCESS;
}
