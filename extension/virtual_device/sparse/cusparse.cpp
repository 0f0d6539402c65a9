// cuSPARSE: the handle, matrices, and the sizes of buffers. The rest is generated from the library's own header
// (stubs/answer.py): descriptors that say nothing, and work that leaves its result on the device.
//
// cuSPARSE does not document how large its buffers are. Each is an estimate: one 4-byte index for each row and entry,
// what a routine needs that balances its load over the rows.

#include <cusparse.h>

#include <algorithm>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/sparse/answers.h"

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  cusparsePointerMode_t pointer_mode = CUSPARSE_POINTER_MODE_HOST;
};

Handle* find_handle(cusparseHandle_t handle) { return reinterpret_cast<Handle*>(handle); }

int64_t value_bytes(cudaDataType type) {
  switch (static_cast<int>(type)) {
    case CUDA_C_64F:
      return 16;
    case CUDA_R_64F:
    case CUDA_C_32F:
      return 8;
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    default:
      return 4;
  }
}

int64_t index_bytes(cusparseIndexType_t type) { return type == CUSPARSE_INDEX_64I ? 8 : 4; }

cusparseStatus_t give_matrix(cusparseSpMatDescr_t* matrix, oomdiag::SparseMatrix contents) {
  *matrix = reinterpret_cast<cusparseSpMatDescr_t>(new oomdiag::SparseMatrix(contents));
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t give_estimate_for(const char* name, cusparseConstSpMatDescr_t matrix, size_t* bytes) {
  const oomdiag::SparseMatrix& sparse = *oomdiag::find_matrix(matrix);
  return oomdiag::give_estimate(name, {{"m", sparse.rows}, {"nnz", sparse.entries}}, bytes);
}

}  // namespace

namespace oomdiag {

cusparseStatus_t submit(cusparseHandle_t handle) {
  if (!handle) return CUSPARSE_STATUS_NOT_INITIALIZED;
  const CUresult error = oomdiag_device_submit(find_handle(handle)->stream, CU_GRAPH_NODE_TYPE_KERNEL);
  return error ? CUSPARSE_STATUS_EXECUTION_FAILED : CUSPARSE_STATUS_SUCCESS;
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

extern "C" int oomdiag_unsupported(const char* name) {
  oomdiag_device_note("unsupported", name);
  return CUSPARSE_STATUS_NOT_SUPPORTED;
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseCreate(cusparseHandle_t* handle) {
  cudaFree(nullptr);  // makes the context, as the real one does
  if (const CUresult error = oomdiag_device_use_library()) {
    return error == CUDA_ERROR_OUT_OF_MEMORY ? CUSPARSE_STATUS_ALLOC_FAILED : CUSPARSE_STATUS_NOT_INITIALIZED;
  }
  *handle = reinterpret_cast<cusparseHandle_t>(new Handle);
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseDestroy(cusparseHandle_t handle) {
  delete find_handle(handle);
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSetStream(cusparseHandle_t handle, cudaStream_t stream) {
  find_handle(handle)->stream = stream;
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseGetStream(cusparseHandle_t handle, cudaStream_t* stream) {
  *stream = find_handle(handle)->stream;
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSetPointerMode(cusparseHandle_t handle, cusparsePointerMode_t mode) {
  find_handle(handle)->pointer_mode = mode;
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseGetPointerMode(cusparseHandle_t handle, cusparsePointerMode_t* mode) {
  *mode = find_handle(handle)->pointer_mode;
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseGetVersion(cusparseHandle_t, int* version) {
  *version = CUSPARSE_VERSION;
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT const char* cusparseGetErrorString(cusparseStatus_t status) {
  return status ? "virtual cuSPARSE: not supported" : "success";
}
OOMDIAG_ENTRY_POINT const char* cusparseGetErrorName(cusparseStatus_t status) {
  return status ? "CUSPARSE_STATUS_NOT_SUPPORTED" : "CUSPARSE_STATUS_SUCCESS";
}

// Matrices, which know their size: the size of a product follows from it.

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseCreateCsr(cusparseSpMatDescr_t* matrix, int64_t rows, int64_t columns,
                                                       int64_t entries, void*, void*, void*, cusparseIndexType_t,
                                                       cusparseIndexType_t index, cusparseIndexBase_t,
                                                       cudaDataType type) {
  return give_matrix(matrix, {rows, columns, entries, value_bytes(type) + index_bytes(index)});
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseCreateCsc(cusparseSpMatDescr_t* matrix, int64_t rows, int64_t columns,
                                                       int64_t entries, void*, void*, void*, cusparseIndexType_t,
                                                       cusparseIndexType_t index, cusparseIndexBase_t,
                                                       cudaDataType type) {
  return give_matrix(matrix, {rows, columns, entries, value_bytes(type) + index_bytes(index)});
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseCreateCoo(cusparseSpMatDescr_t* matrix, int64_t rows, int64_t columns,
                                                       int64_t entries, void*, void*, void*, cusparseIndexType_t index,
                                                       cusparseIndexBase_t, cudaDataType type) {
  return give_matrix(matrix, {rows, columns, entries, value_bytes(type) + 2 * index_bytes(index)});
}
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

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSpMV_bufferSize(cusparseHandle_t, cusparseOperation_t, const void*,
                                                             cusparseConstSpMatDescr_t matrix,
                                                             cusparseConstDnVecDescr_t, const void*,
                                                             cusparseDnVecDescr_t, cudaDataType, cusparseSpMVAlg_t,
                                                             size_t* bytes) {
  return give_estimate_for("cusparseSpMV_bufferSize", matrix, bytes);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSpMM_bufferSize(cusparseHandle_t, cusparseOperation_t, cusparseOperation_t,
                                                             const void*, cusparseConstSpMatDescr_t matrix,
                                                             cusparseConstDnMatDescr_t, const void*,
                                                             cusparseDnMatDescr_t, cudaDataType, cusparseSpMMAlg_t,
                                                             size_t* bytes) {
  return give_estimate_for("cusparseSpMM_bufferSize", matrix, bytes);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSDDMM_bufferSize(cusparseHandle_t, cusparseOperation_t,
                                                              cusparseOperation_t, const void*,
                                                              cusparseConstDnMatDescr_t, cusparseConstDnMatDescr_t,
                                                              const void*, cusparseSpMatDescr_t matrix, cudaDataType,
                                                              cusparseSDDMMAlg_t, size_t* bytes) {
  return give_estimate_for("cusparseSDDMM_bufferSize", matrix, bytes);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSpSV_bufferSize(cusparseHandle_t, cusparseOperation_t, const void*,
                                                             cusparseConstSpMatDescr_t matrix,
                                                             cusparseConstDnVecDescr_t, cusparseDnVecDescr_t,
                                                             cudaDataType, cusparseSpSVAlg_t, cusparseSpSVDescr_t,
                                                             size_t* bytes) {
  return give_estimate_for("cusparseSpSV_bufferSize", matrix, bytes);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSpSM_bufferSize(cusparseHandle_t, cusparseOperation_t, cusparseOperation_t,
                                                             const void*, cusparseConstSpMatDescr_t matrix,
                                                             cusparseConstDnMatDescr_t, cusparseDnMatDescr_t,
                                                             cudaDataType, cusparseSpSMAlg_t, cusparseSpSMDescr_t,
                                                             size_t* bytes) {
  return give_estimate_for("cusparseSpSM_bufferSize", matrix, bytes);
}

// Pivots: none is zero.

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseXbsrsv2_zeroPivot(cusparseHandle_t, bsrsv2Info_t, int* position) {
  *position = -1;
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseXbsrsm2_zeroPivot(cusparseHandle_t, bsrsm2Info_t, int* position) {
  *position = -1;
  return CUSPARSE_STATUS_SUCCESS;
}
