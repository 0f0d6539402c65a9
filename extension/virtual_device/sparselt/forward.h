#pragma once

#include <cusparseLt.h>

#include "extension/virtual_device/stubs/handle.h"

// What the lines of this library's entry_points.txt call, beside stubs/handle.h.

namespace oomdiag {

/// What an object of cuSPARSELt's says: a struct that the caller owns and this library fills.
struct LtMatrix {
  int64_t rows = 0;
  int64_t columns = 0;
  cudaDataType type = CUDA_R_16F;
};

/// The first bytes of the caller's object, which is larger and aligned to 16.
template <typename Object>
LtMatrix& matrix_of(Object* object) {
  static_assert(sizeof(LtMatrix) <= sizeof(Object));
  return *reinterpret_cast<LtMatrix*>(object->data);
}
template <typename Object>
const LtMatrix& matrix_of(const Object* object) {
  return *reinterpret_cast<const LtMatrix*>(object->data);
}

template <typename Object>
Success fill(Object* object, const LtMatrix& matrix) {
  matrix_of(object) = matrix;
  return {};
}

/// The compressed form of a matrix, in bytes, and a buffer to make it; noted as an estimate.
cusparseStatus_t give_compressed(const char* name, const LtMatrix& matrix, size_t* bytes, size_t* buffer_bytes);

/// A kernel on a stream.
cusparseStatus_t submit_to(cudaStream_t stream);
/// … on the first of `count` streams, or the default stream.
inline cusparseStatus_t submit_to_first(const cudaStream_t* streams, int32_t count) {
  return submit_to(count > 0 && streams ? *streams : nullptr);
}

}  // namespace oomdiag
