// What CUDA 12 has besides: the forms of functions that CUDA 13 dropped.

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/runtime/status.h"

OOMDIAG_ENTRY_POINT cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                                            unsigned long long* id, cudaGraph_t* graph,
                                                            const cudaGraphNode_t** dependencies, size_t* count) {
  return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, nullptr, count);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* dependencies,
                                                                    size_t count, unsigned flags) {
  return cudaStreamUpdateCaptureDependencies_v2(stream, dependencies, nullptr, count, flags);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphAddNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                                 const cudaGraphNode_t* dependencies, size_t count,
                                                 cudaGraphNodeParams* parameters) {
  return cudaGraphAddNode_v2(node, graph, dependencies, nullptr, count, parameters);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes,
                                                             size_t* count) {
  return cudaGraphNodeGetDependencies_v2(node, nodes, nullptr, count);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, int) { return cudaSuccess; }
OOMDIAG_ENTRY_POINT cudaError_t cudaMemPrefetchAsync(const void*, size_t, int, cudaStream_t) { return cudaSuccess; }
