// cuBLASLt. PyTorch takes the largest workspace that it allows itself, whatever the heuristic says,
// so that any successful answer will do, where the GPU multiplies such types. Descriptors are opaque; of matrices the types and
// sizes are kept.

#include <cublasLt.h>

#include <algorithm>
#include <cstring>

#include "extension/virtual_device/blas/forward.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::LtLayout;
using oomdiag::LtPreference;

namespace {

const LtLayout& find_layout(cublasLtMatrixLayout_t layout) { return *reinterpret_cast<const LtLayout*>(layout); }

/// The common side of a product is what the first factor has beside the rows of the result, transposed or not.
double count_flops(const LtLayout& first, const LtLayout& result) {
  if (result.rows == 0) return 0;
  const double common = first.rows * first.columns / result.rows;
  return oomdiag::count_flops(result.rows, result.columns, common, result.batch, first.type);
}

struct FactorType {
  cudaDataType type;
  int capability;  ///< the least that multiplies it, as in 89
};

/// What the factors of a product may be (cuBLAS, cublasLtMatmul: "supported data types"; 8 bits from 8.9 on, 4 bits from 10.0).
constexpr FactorType kFactorTypes[] = {
    {CUDA_R_16F, 0}, {CUDA_R_16BF, 0}, {CUDA_R_32F, 0},      {CUDA_R_64F, 0},      {CUDA_C_32F, 0},
    {CUDA_C_64F, 0}, {CUDA_R_8I, 0},   {CUDA_R_8F_E4M3, 89}, {CUDA_R_8F_E5M2, 89}, {CUDA_R_4F_E2M1, 100},
};

int compute_capability() {
  CUdevice device = 0;
  int major = 0;
  int minor = 0;
  if (cuCtxGetDevice(&device)) return 0;
  cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  return major * 10 + minor;
}

bool is_multiplied(cudaDataType type, int capability) {
  return std::ranges::any_of(kFactorTypes,
                             [&](const FactorType& one) { return one.type == type && one.capability <= capability; });
}

/// Success where the GPU multiplies such factors. Two of E5M2 are multiplied by none.
cublasStatus_t check_factors(cublasLtMatrixLayout_t first, cublasLtMatrixLayout_t second) {
  const cudaDataType types[] = {find_layout(first).type, find_layout(second).type};
  const int capability = compute_capability();
  const bool is_known = is_multiplied(types[0], capability) && is_multiplied(types[1], capability);
  const bool is_twice_e5m2 = types[0] == CUDA_R_8F_E5M2 && types[1] == CUDA_R_8F_E5M2;
  return is_known && !is_twice_e5m2 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/// Bytes of workspace of the best algorithm for this product. On Hopper those of most products want some, as an H200 answered with cuBLAS 13.1
/// for the products of which cuDNN makes convolutions with a window of 1; small results have other kernels. cuDNN adds 256 bytes, and
/// PyTorch passes a workspace of its own size. What other GPUs of 2022 and later want is not known.
size_t find_workspace(const LtLayout& first, const LtLayout& result) {
  constexpr int kHopper = 90;
  if (compute_capability() != kHopper) return 0;
  const double less = std::min(result.rows, result.columns);
  if (first.type == CUDA_R_32F) return less >= 32 ? 144 : 0;
  const bool is_half = first.type == CUDA_R_16F || first.type == CUDA_R_16BF;
  const bool is_small = less <= 64 && std::max(result.rows, result.columns) <= 128;
  return is_half && !is_small ? 16 : 0;
}

/// Keeps the value of an attribute, if it has the size of what is kept.
template <typename Kept>
void keep(Kept* kept, const void* value, size_t bytes) {
  if (bytes == sizeof(Kept)) std::memcpy(kept, value, bytes);
}

}  // namespace

OOMDIAG_ENTRY_POINT size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
OOMDIAG_ENTRY_POINT size_t cublasLtGetCudartVersion() { return CUDART_VERSION; }

OOMDIAG_ENTRY_POINT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                                              uint64_t rows, uint64_t columns, int64_t) {
  auto* kept = new LtLayout{.type = type, .rows = static_cast<double>(rows), .columns = static_cast<double>(columns)};
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(kept);
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                                    cublasLtMatrixLayoutAttribute_t attribute,
                                                                    const void* value, size_t bytes) {
  auto* const kept = reinterpret_cast<LtLayout*>(layout);
  if (attribute == CUBLASLT_MATRIX_LAYOUT_TYPE) keep(&kept->type, value, bytes);
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) keep(&kept->batch, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                                        cublasLtMatmulPreferenceAttributes_t attribute,
                                                                        const void* value, size_t bytes) {
  auto* const kept = reinterpret_cast<LtPreference*>(preference);
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) keep(&kept->workspace_bytes, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t first, cublasLtMatrixLayout_t second,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t result, cublasLtMatmulPreference_t preference, int requested,
    cublasLtMatmulHeuristicResult_t* results, int* given) {
  *given = 0;
  if (const cublasStatus_t error = check_factors(first, second)) return error;
  *given = requested > 0;
  if (!*given) return CUBLAS_STATUS_SUCCESS;
  results[0] = {};  // state 0 is CUBLAS_STATUS_SUCCESS
  const size_t workspace = find_workspace(find_layout(first), find_layout(result));
  const uint64_t allowed = preference ? reinterpret_cast<LtPreference*>(preference)->workspace_bytes : 0;
  if (workspace <= allowed) results[0].workspaceSize = workspace;
  return CUBLAS_STATUS_SUCCESS;
}
OOMDIAG_ENTRY_POINT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                                           cublasLtMatrixLayout_t first, cublasLtMatrixLayout_t second,
                                                           cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                           const cublasLtMatmulAlgo_t*,
                                                           cublasLtMatmulHeuristicResult_t* result) {
  *result = {};
  return check_factors(first, second);
}
/// Everything of the one algorithm is number 0.
OOMDIAG_ENTRY_POINT cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*,
                                                                        cublasLtMatmulAlgoConfigAttributes_t,
                                                                        void* value, size_t bytes, size_t* written) {
  if (value) std::memset(value, 0, bytes);
  if (written) *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}

OOMDIAG_ENTRY_POINT cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                                                  cublasLtMatrixLayout_t first, const void*,
                                                  cublasLtMatrixLayout_t second, const void*, const void*,
                                                  cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t result,
                                                  const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  if (const cublasStatus_t error = check_factors(first, second)) return error;
  const double flops = count_flops(find_layout(first), find_layout(result));
  return oomdiag::executed(oomdiag_device_compute(stream, 0, flops));
}
