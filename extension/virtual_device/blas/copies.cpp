// Copies of vectors and matrices between the host and the GPU (MAGMA, inside torch_cuda_linalg, makes them). Both ways are
// one copy: the driver knows which side an address is of.

#include <cublas_v2.h>

#include <cstdint>

#include "extension/virtual_device/entry_point.h"

namespace {

/// `width` bytes of each of `count` rows, which begin so many bytes apart.
cublasStatus_t copy(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t count,
                    cudaStream_t stream, bool waits) {
  if (width < 0 || count < 0 || to_pitch < width || from_pitch < width) return CUBLAS_STATUS_INVALID_VALUE;
  const auto size = [](int64_t bytes) { return static_cast<size_t>(bytes); };
  const bool is_dense = to_pitch == width && from_pitch == width;
  cudaError_t error = is_dense ? cudaMemcpyAsync(to, from, size(width * count), cudaMemcpyDefault, stream)
                               : cudaMemcpy2DAsync(to, size(to_pitch), from, size(from_pitch), size(width), size(count),
                                                   cudaMemcpyDefault, stream);
  if (!error && waits) error = cudaStreamSynchronize(stream);
  return error ? CUBLAS_STATUS_MAPPING_ERROR : CUBLAS_STATUS_SUCCESS;
}

}  // namespace

// The names end in nothing, or in _64 where the integers have as many bits.
#define OOMDIAG_COPIES(way, suffix, integer)                                                                          \
  OOMDIAG_ENTRY_POINT cublasStatus_t cublas##way##Vector##suffix(integer count, integer bytes, const void* from,      \
                                                                 integer from_step, void* to, integer to_step) {      \
    return copy(to, int64_t{to_step} * bytes, from, int64_t{from_step} * bytes, bytes, count, nullptr, true);         \
  }                                                                                                                   \
  OOMDIAG_ENTRY_POINT cublasStatus_t cublas##way##VectorAsync##suffix(integer count, integer bytes, const void* from, \
                                                                      integer from_step, void* to, integer to_step,   \
                                                                      cudaStream_t stream) {                          \
    return copy(to, int64_t{to_step} * bytes, from, int64_t{from_step} * bytes, bytes, count, stream, false);         \
  }                                                                                                                   \
  OOMDIAG_ENTRY_POINT cublasStatus_t cublas##way##Matrix##suffix(                                                     \
      integer rows, integer columns, integer bytes, const void* from, integer from_rows, void* to, integer to_rows) { \
    return copy(to, int64_t{to_rows} * bytes, from, int64_t{from_rows} * bytes, int64_t{rows} * bytes, columns,       \
                nullptr, true);                                                                                       \
  }                                                                                                                   \
  OOMDIAG_ENTRY_POINT cublasStatus_t cublas##way##MatrixAsync##suffix(integer rows, integer columns, integer bytes,   \
                                                                      const void* from, integer from_rows, void* to,  \
                                                                      integer to_rows, cudaStream_t stream) {         \
    return copy(to, int64_t{to_rows} * bytes, from, int64_t{from_rows} * bytes, int64_t{rows} * bytes, columns,       \
                stream, false);                                                                                       \
  }
OOMDIAG_COPIES(Set, , int)
OOMDIAG_COPIES(Set, _64, int64_t)
OOMDIAG_COPIES(Get, , int)
OOMDIAG_COPIES(Get, _64, int64_t)
