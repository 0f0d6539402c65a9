// cuFFT. Nothing is transformed; what counts is the work area, which PyTorch allocates itself, and which other programs
// leave to the library (cufftSetAutoAllocation): then it is taken from the card here.

#include <cufft.h>
#include <cufftXt.h>

#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/locks.h"

namespace {

struct Plan {
  cudaStream_t stream = nullptr;
  bool allocates = true;
  size_t work_bytes = 0;
  void* work_area = nullptr;
};

// Never destroyed: plans are destroyed by static destructors too.
auto& lock = *new oomdiag::LibraryLock;
auto& plans = *new std::unordered_map<cufftHandle, Plan>;

/// The plan of `handle`, or null. References stay valid while other plans come and go.
Plan* find_plan(cufftHandle handle) {
  std::lock_guard guard(lock);
  const auto entry = plans.find(handle);
  return entry == plans.end() ? nullptr : &entry->second;
}

cufftHandle add_plan() {
  static cufftHandle newest = 0;
  std::lock_guard guard(lock);
  plans[++newest] = {};
  return newest;
}

/// What remains of `size` without the factors that cuFFT has kernels for.
long long strip_small_factors(long long size) {
  for (const int factor : {2, 3, 5, 7}) {
    while (size > 1 && size % factor == 0) size /= factor;
  }
  return size;
}

/// cuFFT documents only bounds: from nothing to eight copies of the batch. Taken here: nothing for a transform in one
/// dimension that fits into shared memory; else one copy; two where a size has a prime factor above 127, as those go by
/// Bluestein's algorithm, which pads (cuFFT documentation, "Accuracy and performance").
size_t estimate_bytes(std::span<const long long> sizes, long long batch, size_t element_bytes) {
  constexpr long long kMaxInSharedMemory = 4096;
  long long elements = batch;
  bool has_small_factors = true;
  bool pads = false;
  for (const long long size : sizes) {
    elements *= size;
    has_small_factors = has_small_factors && strip_small_factors(size) == 1;
    pads = pads || strip_small_factors(size) > 127;
  }
  if (sizes.size() == 1 && has_small_factors && sizes[0] <= kMaxInSharedMemory) return 0;
  return static_cast<size_t>(elements) * element_bytes * (pads ? 2 : 1);
}

size_t element_bytes(cufftType type) { return type == CUFFT_D2Z || type == CUFFT_Z2D || type == CUFFT_Z2Z ? 16 : 8; }

size_t element_bytes(cudaDataType type) {
  switch (static_cast<int>(type)) {
    case CUDA_C_64F:
    case CUDA_R_64F:
      return 16;
    case CUDA_C_16F:
    case CUDA_R_16F:
    case CUDA_C_16BF:
    case CUDA_R_16BF:
      return 4;
    default:
      return 8;
  }
}

cufftResult estimate(const char* name, std::span<const long long> sizes, long long batch, size_t bytes, size_t* place) {
  for (const long long size : sizes) {
    if (size <= 0) return CUFFT_INVALID_SIZE;
  }
  oomdiag_device_note("estimate", name);
  *place = estimate_bytes(sizes, batch, bytes);
  return CUFFT_SUCCESS;
}

cufftResult make(cufftHandle handle, std::span<const long long> sizes, long long batch, size_t bytes, size_t* place) {
  Plan* plan = find_plan(handle);
  if (!plan) return CUFFT_INVALID_PLAN;
  if (const cufftResult error = estimate("cuFFT work area", sizes, batch, bytes, &plan->work_bytes)) return error;
  if (place) *place = plan->work_bytes;
  if (!plan->allocates || !plan->work_bytes) return CUFFT_SUCCESS;
  return cudaMalloc(&plan->work_area, plan->work_bytes) ? CUFFT_ALLOC_FAILED : CUFFT_SUCCESS;
}

cufftResult make_new(cufftHandle* handle, std::span<const long long> sizes, long long batch, cufftType type) {
  if (const cufftResult error = cufftCreate(handle)) return error;
  return make(*handle, sizes, batch, element_bytes(type), nullptr);
}

cufftResult execute(cufftHandle handle) {
  const Plan* plan = find_plan(handle);
  if (!plan) return CUFFT_INVALID_PLAN;
  return oomdiag_device_submit(plan->stream, CU_GRAPH_NODE_TYPE_KERNEL) ? CUFFT_EXEC_FAILED : CUFFT_SUCCESS;
}

std::vector<long long> widen(const int* sizes, int rank) { return {sizes, sizes + rank}; }
std::span<const long long> view(const long long* sizes, int rank) { return {sizes, static_cast<size_t>(rank)}; }

}  // namespace

extern "C" int oomdiag_unsupported(const char* name) {
  oomdiag_device_note("unsupported", name);
  return CUFFT_NOT_SUPPORTED;
}

OOMDIAG_ENTRY_POINT cufftResult cufftCreate(cufftHandle* handle) {
  cudaFree(nullptr);  // makes the context, as the real one does
  if (const CUresult error = oomdiag_device_use_library()) {
    return error == CUDA_ERROR_OUT_OF_MEMORY ? CUFFT_ALLOC_FAILED : CUFFT_SETUP_FAILED;
  }
  *handle = add_plan();
  return CUFFT_SUCCESS;
}
OOMDIAG_ENTRY_POINT cufftResult cufftDestroy(cufftHandle handle) {
  Plan* plan = find_plan(handle);
  if (!plan) return CUFFT_INVALID_PLAN;
  if (plan->work_area) cudaFree(plan->work_area);
  std::lock_guard guard(lock);
  plans.erase(handle);
  return CUFFT_SUCCESS;
}
OOMDIAG_ENTRY_POINT cufftResult cufftSetStream(cufftHandle handle, cudaStream_t stream) {
  Plan* plan = find_plan(handle);
  if (plan) plan->stream = stream;
  return plan ? CUFFT_SUCCESS : CUFFT_INVALID_PLAN;
}
OOMDIAG_ENTRY_POINT cufftResult cufftSetAutoAllocation(cufftHandle handle, int allocates) {
  Plan* plan = find_plan(handle);
  if (plan) plan->allocates = allocates;
  return plan ? CUFFT_SUCCESS : CUFFT_INVALID_PLAN;
}
OOMDIAG_ENTRY_POINT cufftResult cufftSetWorkArea(cufftHandle handle, void*) {
  return find_plan(handle) ? CUFFT_SUCCESS : CUFFT_INVALID_PLAN;
}
OOMDIAG_ENTRY_POINT cufftResult cufftGetSize(cufftHandle handle, size_t* bytes) {
  const Plan* plan = find_plan(handle);
  if (plan) *bytes = plan->work_bytes;
  return plan ? CUFFT_SUCCESS : CUFFT_INVALID_PLAN;
}
OOMDIAG_ENTRY_POINT cufftResult cufftGetVersion(int* version) {
  *version = CUFFT_VERSION;
  return CUFFT_SUCCESS;
}

OOMDIAG_ENTRY_POINT cufftResult cufftPlan1d(cufftHandle* handle, int x, cufftType type, int batch) {
  return make_new(handle, std::vector<long long>{x}, batch, type);
}
OOMDIAG_ENTRY_POINT cufftResult cufftPlan2d(cufftHandle* handle, int x, int y, cufftType type) {
  return make_new(handle, std::vector<long long>{x, y}, 1, type);
}
OOMDIAG_ENTRY_POINT cufftResult cufftPlan3d(cufftHandle* handle, int x, int y, int z, cufftType type) {
  return make_new(handle, std::vector<long long>{x, y, z}, 1, type);
}
OOMDIAG_ENTRY_POINT cufftResult cufftPlanMany(cufftHandle* handle, int rank, int* sizes, int*, int, int, int*, int, int,
                                              cufftType type, int batch) {
  return make_new(handle, widen(sizes, rank), batch, type);
}

OOMDIAG_ENTRY_POINT cufftResult cufftMakePlan1d(cufftHandle handle, int x, cufftType type, int batch, size_t* bytes) {
  return make(handle, std::vector<long long>{x}, batch, element_bytes(type), bytes);
}
OOMDIAG_ENTRY_POINT cufftResult cufftMakePlan2d(cufftHandle handle, int x, int y, cufftType type, size_t* bytes) {
  return make(handle, std::vector<long long>{x, y}, 1, element_bytes(type), bytes);
}
OOMDIAG_ENTRY_POINT cufftResult cufftMakePlan3d(cufftHandle handle, int x, int y, int z, cufftType type,
                                                size_t* bytes) {
  return make(handle, std::vector<long long>{x, y, z}, 1, element_bytes(type), bytes);
}
OOMDIAG_ENTRY_POINT cufftResult cufftMakePlanMany(cufftHandle handle, int rank, int* sizes, int*, int, int, int*, int,
                                                  int, cufftType type, int batch, size_t* bytes) {
  return make(handle, widen(sizes, rank), batch, element_bytes(type), bytes);
}
OOMDIAG_ENTRY_POINT cufftResult cufftMakePlanMany64(cufftHandle handle, int rank, long long* sizes, long long*,
                                                    long long, long long, long long*, long long, long long,
                                                    cufftType type, long long batch, size_t* bytes) {
  return make(handle, view(sizes, rank), batch, element_bytes(type), bytes);
}
OOMDIAG_ENTRY_POINT cufftResult cufftXtMakePlanMany(cufftHandle handle, int rank, long long* sizes, long long*,
                                                    long long, long long, cudaDataType, long long*, long long,
                                                    long long, cudaDataType, long long batch, size_t* bytes,
                                                    cudaDataType type) {
  return make(handle, view(sizes, rank), batch, element_bytes(type), bytes);
}

OOMDIAG_ENTRY_POINT cufftResult cufftEstimate1d(int x, cufftType type, int batch, size_t* bytes) {
  return estimate("cufftEstimate1d", std::vector<long long>{x}, batch, element_bytes(type), bytes);
}
OOMDIAG_ENTRY_POINT cufftResult cufftEstimate2d(int x, int y, cufftType type, size_t* bytes) {
  return estimate("cufftEstimate2d", std::vector<long long>{x, y}, 1, element_bytes(type), bytes);
}
OOMDIAG_ENTRY_POINT cufftResult cufftEstimate3d(int x, int y, int z, cufftType type, size_t* bytes) {
  return estimate("cufftEstimate3d", std::vector<long long>{x, y, z}, 1, element_bytes(type), bytes);
}

OOMDIAG_ENTRY_POINT cufftResult cufftXtExec(cufftHandle handle, void*, void*, int) { return execute(handle); }
OOMDIAG_ENTRY_POINT cufftResult cufftExecC2C(cufftHandle handle, cufftComplex*, cufftComplex*, int) {
  return execute(handle);
}
OOMDIAG_ENTRY_POINT cufftResult cufftExecR2C(cufftHandle handle, cufftReal*, cufftComplex*) { return execute(handle); }
OOMDIAG_ENTRY_POINT cufftResult cufftExecC2R(cufftHandle handle, cufftComplex*, cufftReal*) { return execute(handle); }
OOMDIAG_ENTRY_POINT cufftResult cufftExecZ2Z(cufftHandle handle, cufftDoubleComplex*, cufftDoubleComplex*, int) {
  return execute(handle);
}
OOMDIAG_ENTRY_POINT cufftResult cufftExecD2Z(cufftHandle handle, cufftDoubleReal*, cufftDoubleComplex*) {
  return execute(handle);
}
OOMDIAG_ENTRY_POINT cufftResult cufftExecZ2D(cufftHandle handle, cufftDoubleComplex*, cufftDoubleReal*) {
  return execute(handle);
}
