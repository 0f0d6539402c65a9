// Other forms of functions that are served elsewhere: what programs get that ask cuGetProcAddress for an older version of CUDA
// or for the newest, and what CUDA has under several names.

#include <cuda.h>

#include "extension/virtual_device/driver/device.h"

namespace {

CUresult copy_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, CUstream stream) {
  for (size_t i = 0; i < count; ++i) {
    if (const CUresult error = cuMemcpyAsync(to[i], from[i], bytes[i], stream)) return error;
  }
  return CUDA_SUCCESS;
}

}  // namespace

#undef cuLaunchHostFunc_v2
OOMDIAG_ENTRY_POINT CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void* argument, unsigned) {
  return cuLaunchHostFunc(stream, function, argument);
}

OOMDIAG_ENTRY_POINT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green) {
  if (green) *green = nullptr;
  return cuStreamGetCtx(stream, context);
}

#undef cuDeviceGetUuid
OOMDIAG_ENTRY_POINT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
  return cuDeviceGetUuid_v2(uuid, ordinal);
}

#undef cuEventElapsedTime
OOMDIAG_ENTRY_POINT CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

#undef cuMemAdvise
OOMDIAG_ENTRY_POINT CUresult cuMemAdvise(CUdeviceptr, size_t, CUmem_advise, CUdevice) { return CUDA_SUCCESS; }
#undef cuMemPrefetchAsync
OOMDIAG_ENTRY_POINT CUresult cuMemPrefetchAsync(CUdeviceptr, size_t, CUdevice, CUstream) { return CUDA_SUCCESS; }

#undef cuGraphAddNode
OOMDIAG_ENTRY_POINT CUresult cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                                            size_t count, CUgraphNodeParams* parameters) {
  return cuGraphAddNode_v2(node, graph, dependencies, nullptr, count, parameters);
}
#undef cuGraphNodeGetDependencies
OOMDIAG_ENTRY_POINT CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* nodes, size_t* count) {
  return cuGraphNodeGetDependencies_v2(node, nodes, nullptr, count);
}

/// A graph of the same shape: what its kernels are called with is nobody's concern.
OOMDIAG_ENTRY_POINT CUresult cuGraphExecUpdate(CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo* info) {
  if (info) *info = {};
  return CUDA_SUCCESS;
}

#undef cuStreamGetCaptureInfo_v2
OOMDIAG_ENTRY_POINT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                                       CUgraph* graph, const CUgraphNode** dependencies,
                                                       size_t* count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, nullptr, count);
}
#undef cuStreamUpdateCaptureDependencies
OOMDIAG_ENTRY_POINT CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode* nodes, size_t count,
                                                               unsigned flags) {
  return cuStreamUpdateCaptureDependencies_v2(stream, nodes, nullptr, count, flags);
}

OOMDIAG_ENTRY_POINT CUresult cuMemAllocPitch(CUdeviceptr* block, size_t* pitch, size_t width, size_t height, unsigned) {
  *pitch = (width + 511) / 512 * 512;
  return cuMemAlloc(block, *pitch * height);
}

OOMDIAG_ENTRY_POINT CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes) {
  return cuMemcpy(to, from, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes,
                                               CUstream stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
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

// What kernels prefer of caches, and where managed memory should be: nothing here.

OOMDIAG_ENTRY_POINT CUresult cuCtxResetPersistingL2Cache() { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuCtxSetCacheConfig(CUfunc_cache) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuCtxGetCacheConfig(CUfunc_cache* config) {
  *config = CU_FUNC_CACHE_PREFER_NONE;
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuCtxSetFlags(unsigned) { return CUDA_SUCCESS; }
OOMDIAG_ENTRY_POINT CUresult cuMemPrefetchBatchAsync(CUdeviceptr*, size_t*, size_t, CUmemLocation*, size_t*, size_t,
                                                     unsigned long long, CUstream) {
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyWithAttributesAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                                         CUmemcpyAttributes*, CUstream stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}
