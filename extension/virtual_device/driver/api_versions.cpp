// Other forms of functions that are served elsewhere, where one line of entry_points.txt is not enough: what programs get that ask
// cuGetProcAddress for an older version of CUDA or for the newest.

#include <cuda.h>

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/entry_point.h"

namespace {

CUresult copy_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, CUstream stream) {
  for (size_t i = 0; i < count; ++i) {
    if (const CUresult error = cuMemcpyAsync(to[i], from[i], bytes[i], stream)) return error;
  }
  return CUDA_SUCCESS;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green) {
  if (green) *green = nullptr;
  return cuStreamGetCtx(stream, context);
}

/// Kernel arguments are not modelled, so that an update always succeeds.
OOMDIAG_ENTRY_POINT CUresult cuGraphExecUpdate(CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo* info) {
  if (info) *info = {};
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuMemAllocPitch(CUdeviceptr* block, size_t* pitch, size_t width, size_t height, unsigned) {
  *pitch = oomdiag::pitch_of(width);
  return cuMemAlloc(block, *pitch * height);
}

OOMDIAG_ENTRY_POINT CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                                                CUmemcpyAttributes*, size_t*, size_t, CUstream stream) {
  return copy_batch(to, from, bytes, count, stream);
}
#undef cuMemcpyBatchAsync
OOMDIAG_ENTRY_POINT CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                                                CUmemcpyAttributes*, size_t*, size_t, size_t*, CUstream stream) {
  return copy_batch(to, from, bytes, count, stream);
}

OOMDIAG_ENTRY_POINT CUresult cuCtxGetCacheConfig(CUfunc_cache* config) {
  *config = CU_FUNC_CACHE_PREFER_NONE;
  return CUDA_SUCCESS;
}
