// cuSPARSELt: products with a matrix of which two of every four entries are kept. Its objects are structs that the
// caller owns and this library fills; most functions are lines of entry_points.txt.

#include <cstring>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/sparselt/forward.h"
#include "extension/virtual_device/stubs/handle.h"

namespace {

/// Half of the entries, and two bits for the place of each, which in types of one byte take twice their share (the
/// factors 9/16 and 10/16 that PyTorch itself reckons with, ATen/native/sparse/cuda/cuSPARSELtOps.cpp).
size_t compressed_bytes(const oomdiag::LtMatrix& matrix) {
  const int64_t entry_bytes = oomdiag::bytes_of(matrix.type);
  const auto dense = static_cast<size_t>(matrix.rows * matrix.columns * entry_bytes);
  return dense / 16 * (entry_bytes == 1 ? 10 : 9);
}

}  // namespace

namespace oomdiag {

cusparseStatus_t give_compressed(const char* name, const LtMatrix& matrix, size_t* bytes, size_t* buffer_bytes) {
  oomdiag_device_note("estimate", name);
  *bytes = compressed_bytes(matrix);
  if (buffer_bytes) *buffer_bytes = 0;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t submit_to(cudaStream_t stream) {
  const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_KERNEL);
  return error ? CUSPARSE_STATUS_EXECUTION_FAILED : CUSPARSE_STATUS_SUCCESS;
}

}  // namespace oomdiag

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtInit(cusparseLtHandle_t* handle) {
  const auto error = oomdiag::use_library(CUSPARSE_STATUS_ALLOC_FAILED, CUSPARSE_STATUS_NOT_INITIALIZED);
  if (error) return error;
  std::memset(handle, 0, sizeof *handle);
  return CUSPARSE_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtGetProperty(libraryPropertyType property, int* value) {
  *value = property == MAJOR_VERSION   ? CUSPARSELT_VER_MAJOR
           : property == MINOR_VERSION ? CUSPARSELT_VER_MINOR
                                       : CUSPARSELT_VER_PATCH;
  return CUSPARSE_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulAlgSelectionInit(const cusparseLtHandle_t*,
                                                                      cusparseLtMatmulAlgSelection_t* selection,
                                                                      const cusparseLtMatmulDescriptor_t*,
                                                                      cusparseLtMatmulAlg_t) {
  std::memset(selection, 0, sizeof *selection);
  return CUSPARSE_STATUS_SUCCESS;
}
/// There is one algorithm: number 0 of 1, not split.
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulAlgGetAttribute(const cusparseLtHandle_t*,
                                                                     const cusparseLtMatmulAlgSelection_t*,
                                                                     cusparseLtMatmulAlgAttribute_t attribute,
                                                                     void* data, size_t bytes) {
  const bool counts = attribute == CUSPARSELT_MATMUL_ALG_CONFIG_MAX_ID || attribute == CUSPARSELT_MATMUL_SPLIT_K;
  const int value = counts ? 1 : 0;
  std::memset(data, 0, bytes);
  std::memcpy(data, &value, bytes < sizeof value ? bytes : sizeof value);
  return CUSPARSE_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulGetWorkspace(const cusparseLtHandle_t*,
                                                                  const cusparseLtMatmulPlan_t*, size_t* bytes) {
  oomdiag_device_note("estimate", "cusparseLtMatmulGetWorkspace");
  *bytes = 0;
  return CUSPARSE_STATUS_SUCCESS;
}
