// cuSPARSELt: products with a matrix of which two of every four entries are kept. Its objects are structs that the
// caller owns and this library fills.

#include <cusparseLt.h>

#include <cstring>

#include "extension/virtual_device/driver/device.h"

namespace {

struct Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  cudaDataType type = CUDA_R_16F;
};

/// The first bytes of the caller's object, which is larger and aligned to 16.
template <typename Content, typename Object>
Content& contents_of(Object* object) {
  static_assert(sizeof(Content) <= sizeof(Object));
  return *reinterpret_cast<Content*>(object->data);
}
template <typename Content, typename Object>
const Content& contents_of(const Object* object) {
  return *reinterpret_cast<const Content*>(object->data);
}

cusparseStatus_t fill(cusparseLtMatDescriptor_t* object, const Matrix& matrix) {
  contents_of<Matrix>(object) = matrix;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t submit(const cudaStream_t stream) {
  const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_KERNEL);
  return error ? CUSPARSE_STATUS_EXECUTION_FAILED : CUSPARSE_STATUS_SUCCESS;
}

size_t element_bytes(cudaDataType type) {
  const int kind = static_cast<int>(type);
  return kind == CUDA_R_32F ? 4 : kind == CUDA_R_16F || kind == CUDA_R_16BF ? 2 : 1;
}

/// Half of the entries, and two bits for the place of each, which in types of one byte take twice their share (the
/// factors 9/16 and 10/16 that PyTorch itself reckons with, ATen/native/sparse/cuda/cuSPARSELtOps.cpp).
size_t compressed_bytes(const Matrix& matrix) {
  const size_t dense = static_cast<size_t>(matrix.rows * matrix.columns) * element_bytes(matrix.type);
  return dense / 16 * (element_bytes(matrix.type) == 1 ? 10 : 9);
}

cusparseStatus_t give_compressed(const char* name, const Matrix& matrix, size_t* bytes, size_t* buffer_bytes) {
  oomdiag_device_note("estimate", name);
  *bytes = compressed_bytes(matrix);
  if (buffer_bytes) *buffer_bytes = 0;
  return CUSPARSE_STATUS_SUCCESS;
}

}  // namespace

extern "C" int oomdiag_unsupported(const char* name) {
  oomdiag_device_note("unsupported", name);
  return CUSPARSE_STATUS_NOT_SUPPORTED;
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtInit(cusparseLtHandle_t* handle) {
  cudaFree(nullptr);  // makes the context, as the real one does
  if (const CUresult error = oomdiag_device_use_library()) {
    return error == CUDA_ERROR_OUT_OF_MEMORY ? CUSPARSE_STATUS_ALLOC_FAILED : CUSPARSE_STATUS_NOT_INITIALIZED;
  }
  std::memset(handle, 0, sizeof *handle);
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtDestroy(const cusparseLtHandle_t*) { return CUSPARSE_STATUS_SUCCESS; }

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtGetVersion(const cusparseLtHandle_t*, int* version) {
  *version = CUSPARSELT_VERSION;
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtGetProperty(libraryPropertyType property, int* value) {
  *value = property == MAJOR_VERSION   ? CUSPARSELT_VER_MAJOR
           : property == MINOR_VERSION ? CUSPARSELT_VER_MINOR
                                       : CUSPARSELT_VER_PATCH;
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT const char* cusparseLtGetErrorName(cusparseStatus_t status) {
  return status ? "CUSPARSE_STATUS_NOT_SUPPORTED" : "CUSPARSE_STATUS_SUCCESS";
}
OOMDIAG_ENTRY_POINT const char* cusparseLtGetErrorString(cusparseStatus_t status) {
  return status ? "virtual cuSPARSELt: not supported" : "success";
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtDenseDescriptorInit(const cusparseLtHandle_t*,
                                                                   cusparseLtMatDescriptor_t* matrix, int64_t rows,
                                                                   int64_t columns, int64_t, uint32_t,
                                                                   cudaDataType type, cusparseOrder_t) {
  return fill(matrix, {rows, columns, type});
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtStructuredDescriptorInit(const cusparseLtHandle_t*,
                                                                        cusparseLtMatDescriptor_t* matrix, int64_t rows,
                                                                        int64_t columns, int64_t, uint32_t,
                                                                        cudaDataType type, cusparseOrder_t,
                                                                        cusparseLtSparsity_t) {
  return fill(matrix, {rows, columns, type});
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatDescriptorDestroy(const cusparseLtMatDescriptor_t*) {
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatDescSetAttribute(const cusparseLtHandle_t*,
                                                                   cusparseLtMatDescriptor_t*,
                                                                   cusparseLtMatDescAttribute_t, const void*, size_t) {
  return CUSPARSE_STATUS_SUCCESS;
}

/// Products keep the sparse operand, whose compressed size a plan is asked for; which of the two it is does not matter:
/// callers pass it first.
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulDescriptorInit(
    const cusparseLtHandle_t*, cusparseLtMatmulDescriptor_t* product, cusparseOperation_t, cusparseOperation_t,
    const cusparseLtMatDescriptor_t* first, const cusparseLtMatDescriptor_t*, const cusparseLtMatDescriptor_t*,
    const cusparseLtMatDescriptor_t*, cusparseComputeType) {
  contents_of<Matrix>(product) = contents_of<Matrix>(first);
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulDescSetAttribute(const cusparseLtHandle_t*,
                                                                      cusparseLtMatmulDescriptor_t*,
                                                                      cusparseLtMatmulDescAttribute_t, const void*,
                                                                      size_t) {
  return CUSPARSE_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulAlgSelectionInit(const cusparseLtHandle_t*,
                                                                      cusparseLtMatmulAlgSelection_t* selection,
                                                                      const cusparseLtMatmulDescriptor_t*,
                                                                      cusparseLtMatmulAlg_t) {
  std::memset(selection, 0, sizeof *selection);
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulAlgSelectionDestroy(const cusparseLtMatmulAlgSelection_t*) {
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulAlgSetAttribute(const cusparseLtHandle_t*,
                                                                     cusparseLtMatmulAlgSelection_t*,
                                                                     cusparseLtMatmulAlgAttribute_t, const void*,
                                                                     size_t) {
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

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulPlanInit(const cusparseLtHandle_t*, cusparseLtMatmulPlan_t* plan,
                                                              const cusparseLtMatmulDescriptor_t* product,
                                                              const cusparseLtMatmulAlgSelection_t*) {
  contents_of<Matrix>(plan) = contents_of<Matrix>(product);
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulPlanDestroy(const cusparseLtMatmulPlan_t*) {
  return CUSPARSE_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulGetWorkspace(const cusparseLtHandle_t*,
                                                                  const cusparseLtMatmulPlan_t*, size_t* bytes) {
  oomdiag_device_note("estimate", "cusparseLtMatmulGetWorkspace");
  *bytes = 0;
  return CUSPARSE_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtSpMMACompressedSize(const cusparseLtHandle_t*,
                                                                   const cusparseLtMatmulPlan_t* plan, size_t* bytes,
                                                                   size_t* buffer_bytes) {
  return give_compressed("cusparseLtSpMMACompressedSize", contents_of<Matrix>(plan), bytes, buffer_bytes);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtSpMMACompressedSize2(const cusparseLtHandle_t*,
                                                                    const cusparseLtMatDescriptor_t* matrix,
                                                                    size_t* bytes, size_t* buffer_bytes) {
  return give_compressed("cusparseLtSpMMACompressedSize2", contents_of<Matrix>(matrix), bytes, buffer_bytes);
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmul(const cusparseLtHandle_t*, const cusparseLtMatmulPlan_t*,
                                                      const void*, const void*, const void*, const void*, const void*,
                                                      void*, void*, cudaStream_t* streams, int32_t count) {
  return submit(count > 0 && streams ? *streams : nullptr);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtMatmulSearch(const cusparseLtHandle_t*, cusparseLtMatmulPlan_t*,
                                                            const void*, const void*, const void*, const void*,
                                                            const void*, void*, void*, cudaStream_t* streams,
                                                            int32_t count) {
  return submit(count > 0 && streams ? *streams : nullptr);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtSpMMAPrune(const cusparseLtHandle_t*,
                                                          const cusparseLtMatmulDescriptor_t*, const void*, void*,
                                                          cusparseLtPruneAlg_t, cudaStream_t stream) {
  return submit(stream);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtSpMMAPrune2(const cusparseLtHandle_t*, const cusparseLtMatDescriptor_t*,
                                                           int, cusparseOperation_t, const void*, void*,
                                                           cusparseLtPruneAlg_t, cudaStream_t stream) {
  return submit(stream);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtSpMMACompress(const cusparseLtHandle_t*, const cusparseLtMatmulPlan_t*,
                                                             const void*, void*, void*, cudaStream_t stream) {
  return submit(stream);
}
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseLtSpMMACompress2(const cusparseLtHandle_t*,
                                                              const cusparseLtMatDescriptor_t*, int,
                                                              cusparseOperation_t, const void*, void*, void*,
                                                              cudaStream_t stream) {
  return submit(stream);
}
