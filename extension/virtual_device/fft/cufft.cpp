// cuFFT. Nothing is transformed; what counts is the work area, which PyTorch allocates itself, and which other programs
// leave to the library (cufftSetAutoAllocation): then it is taken from the GPU here.

#include <mutex>
#include <span>
#include <unordered_map>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/fft/forward.h"

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

cufftResult estimate_area(const char* name, const oomdiag::Sizes& sizes, long long batch, size_t bytes, size_t* place) {
  for (const long long size : sizes) {
    if (size <= 0) return CUFFT_INVALID_SIZE;
  }
  oomdiag_device_note("estimate", name);
  *place = estimate_bytes(sizes, batch, bytes);
  return CUFFT_SUCCESS;
}

cufftResult make_area(cufftHandle handle, const oomdiag::Sizes& sizes, long long batch, size_t bytes, size_t* place) {
  Plan* plan = find_plan(handle);
  if (!plan) return CUFFT_INVALID_PLAN;
  if (const cufftResult error = estimate_area("cuFFT work area", sizes, batch, bytes, &plan->work_bytes)) return error;
  if (place) *place = plan->work_bytes;
  if (!plan->allocates || !plan->work_bytes) return CUFFT_SUCCESS;
  return cudaMalloc(&plan->work_area, plan->work_bytes) ? CUFFT_ALLOC_FAILED : CUFFT_SUCCESS;
}

}  // namespace

namespace oomdiag {

cufftResult execute(cufftHandle handle) {
  const Plan* plan = find_plan(handle);
  if (!plan) return CUFFT_INVALID_PLAN;
  return oomdiag_device_submit(plan->stream, CU_GRAPH_NODE_TYPE_KERNEL) ? CUFFT_EXEC_FAILED : CUFFT_SUCCESS;
}

cufftResult make(cufftHandle plan, const Sizes& sizes, long long batch, cufftType type, size_t* bytes) {
  return make_area(plan, sizes, batch, element_bytes(type), bytes);
}

cufftResult make(cufftHandle plan, const Sizes& sizes, long long batch, cudaDataType type, size_t* bytes) {
  return make_area(plan, sizes, batch, element_bytes(type), bytes);
}

cufftResult make_new(cufftHandle* plan, const Sizes& sizes, long long batch, cufftType type) {
  if (const cufftResult error = cufftCreate(plan)) return error;
  return make(*plan, sizes, batch, type, nullptr);
}

cufftResult estimate(const char* name, const Sizes& sizes, long long batch, cufftType type, size_t* bytes) {
  return estimate_area(name, sizes, batch, element_bytes(type), bytes);
}

}  // namespace oomdiag

OOMDIAG_ENTRY_POINT cufftResult cufftCreate(cufftHandle* handle) {
  if (const auto error = oomdiag::use_library(CUFFT_ALLOC_FAILED, CUFFT_SETUP_FAILED)) return error;
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
