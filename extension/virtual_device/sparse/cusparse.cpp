// cuSPARSE: matrices and the sizes of buffers. The rest is generated: lines of entry_points.txt, and by the library's own header
// (stubs/answer.py) descriptors that say nothing, and work that leaves its result on the device.
//
// cuSPARSE does not document how large its buffers are. Each is an estimate: one 4-byte index for each row and entry,
// what a routine needs that balances its load over the rows.

#include <cusparse.h>

#include <algorithm>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/sparse/answers.h"
#include "extension/virtual_device/sparse/forward.h"
#include "extension/virtual_device/stubs/answers.h"
#include "extension/virtual_device/stubs/handle.h"

namespace {

int64_t index_bytes(cusparseIndexType_t type) { return type == CUSPARSE_INDEX_64I ? 8 : 4; }

}  // namespace

namespace oomdiag {

cusparseStatus_t submit(cusparseHandle_t handle) {
  return submit_kernel<SparseHandle>(handle, CUSPARSE_STATUS_NOT_INITIALIZED, CUSPARSE_STATUS_EXECUTION_FAILED);
}

cusparseStatus_t give_matrix(cusparseSpMatDescr_t* matrix, int64_t rows, int64_t columns, int64_t entries,
                             cudaDataType type, cusparseIndexType_t index, int indices) {
  const SparseMatrix contents{rows, columns, entries, bytes_of(type) + indices * index_bytes(index)};
  *matrix = reinterpret_cast<cusparseSpMatDescr_t>(new SparseMatrix(contents));
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t give_estimate_for(const char* name, cusparseConstSpMatDescr_t matrix, size_t* bytes) {
  const SparseMatrix& sparse = *find_matrix(matrix);
  return give_estimate(name, {{"m", sparse.rows}, {"nnz", sparse.entries}}, bytes);
}

cusparseStatus_t give_estimate(const char* name, Dimensions dimensions, size_t* bytes) {
  constexpr int64_t kIndexBytes = 4;
  oomdiag_device_note("estimate", name);
  const int64_t rows = find_dimension(dimensions, "m", find_dimension(dimensions, "mb"));
  const int64_t entries = find_dimension(dimensions, "nnz", find_dimension(dimensions, "nnzb"));
  *bytes = static_cast<size_t>(kIndexBytes * (rows + 1 + entries));
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t give_estimate(const char* name, Dimensions dimensions, int* bytes) {
  size_t estimate = 0;
  give_estimate(name, dimensions, &estimate);
  *bytes = static_cast<int>(std::min<size_t>(estimate, INT32_MAX));
  return CUSPARSE_STATUS_SUCCESS;
}

}  // namespace oomdiag

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseDestroySpMat(cusparseConstSpMatDescr_t matrix) {
  delete oomdiag::find_matrix(matrix);
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSpMatGetSize(cusparseConstSpMatDescr_t matrix, int64_t* rows,
                                                          int64_t* columns, int64_t* entries) {
  const oomdiag::SparseMatrix& sparse = *oomdiag::find_matrix(matrix);
  *rows = sparse.rows;
  *columns = sparse.columns;
  *entries = sparse.entries;
  return CUSPARSE_STATUS_SUCCESS;
}
