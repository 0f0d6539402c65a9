#pragma once

#include "extension/virtual_device/sparse/answers.h"
#include "extension/virtual_device/stubs/handle.h"

namespace oomdiag {

struct SparseHandle {
  cudaStream_t stream = nullptr;
  cusparsePointerMode_t pointer_mode = CUSPARSE_POINTER_MODE_HOST;
};

/// A matrix knows its size: that of a product follows from it. An entry has so many indices.
cusparseStatus_t give_matrix(cusparseSpMatDescr_t* matrix, int64_t rows, int64_t columns, int64_t entries,
                             cudaDataType type, cusparseIndexType_t index, int indices);

/// The buffer of the function `name` for this matrix, in bytes; noted as an estimate.
cusparseStatus_t give_estimate_for(const char* name, cusparseConstSpMatDescr_t matrix, size_t* bytes);

}  // namespace oomdiag
