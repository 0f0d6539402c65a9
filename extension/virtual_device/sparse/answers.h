#pragma once

#include <cusparse.h>

#include "extension/virtual_device/stubs/answers.h"

namespace oomdiag {

/// Work on the stream of a cuSPARSE handle.
cusparseStatus_t submit(cusparseHandle_t handle);

/// The buffer of the function `name`, in bytes; noted as an estimate.
cusparseStatus_t give_estimate(const char* name, Dimensions dimensions, size_t* bytes);
cusparseStatus_t give_estimate(const char* name, Dimensions dimensions, int* bytes);

/// What this library gives for a cusparseSpMatDescr_t.
struct SparseMatrix {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t entries = 0;
  int64_t entry_bytes = 0;  ///< value and index
};

inline SparseMatrix* find_matrix(cusparseSpMatDescr_t matrix) { return reinterpret_cast<SparseMatrix*>(matrix); }
inline const SparseMatrix* find_matrix(cusparseConstSpMatDescr_t matrix) {
  return reinterpret_cast<const SparseMatrix*>(matrix);
}

}  // namespace oomdiag
