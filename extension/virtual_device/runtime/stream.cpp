// Streams, events, capture and graphs: the driver's functions under the runtime's names.

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/runtime/forms.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::in_context;
using oomdiag::report;

OOMDIAG_ENTRY_POINT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return in_context([&] { return cuStreamCreate(stream, 0); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return in_context([&] { return cuStreamCreate(stream, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return in_context([&] { return cuStreamCreateWithPriority(stream, flags, priority); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamDestroy(cudaStream_t stream) { return report(cuStreamDestroy(stream)); }
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return in_context([&] { return cuStreamQuery(stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return in_context([&] { return cuStreamSynchronize(stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return in_context([&] { return cuStreamWaitEvent(stream, event, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return in_context([&] { return cuStreamGetPriority(stream, priority); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  return in_context([&] { return cuStreamGetFlags(stream, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  return in_context([&] { return cuStreamGetId(stream, id); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* ordinal) {
  return in_context([&] { return cuStreamGetDevice(stream, ordinal); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamSetAttribute(cudaStream_t, cudaLaunchAttributeID,
                                                       const cudaLaunchAttributeValue*) {
  return cudaSuccess;
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamGetAttribute(cudaStream_t stream, cudaLaunchAttributeID attribute,
                                                       cudaLaunchAttributeValue* value) {
  *value = {};
  return attribute == cudaLaunchAttributePriority ? cudaStreamGetPriority(stream, &value->priority) : cudaSuccess;
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamCopyAttributes(cudaStream_t, cudaStream_t) { return cudaSuccess; }
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamAttachMemAsync(cudaStream_t stream, void* block, size_t bytes,
                                                         unsigned flags) {
  return in_context([&] { return cuStreamAttachMemAsync(stream, reinterpret_cast<CUdeviceptr>(block), bytes, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return in_context([&] { return cuLaunchHostFunc(stream, function, argument); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                                      void* argument, unsigned flags) {
  // The two callback types differ in the enumeration of their error alone, whose numbers the libraries share.
  return in_context(
      [&] { return cuStreamAddCallback(stream, reinterpret_cast<CUstreamCallback>(function), argument, flags); });
}

OOMDIAG_ENTRY_POINT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return in_context([&] { return cuEventCreate(event, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
OOMDIAG_ENTRY_POINT cudaError_t cudaEventDestroy(cudaEvent_t event) { return report(cuEventDestroy(event)); }
OOMDIAG_ENTRY_POINT cudaError_t cudaEventQuery(cudaEvent_t event) { return report(cuEventQuery(event)); }
OOMDIAG_ENTRY_POINT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return in_context([&] { return cuEventRecordWithFlags(event, stream, flags); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return report(cuEventSynchronize(event)); }
OOMDIAG_ENTRY_POINT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return report(cuEventElapsedTime(milliseconds, start, end));
}

OOMDIAG_ENTRY_POINT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return report(cuThreadExchangeStreamCaptureMode(reinterpret_cast<CUstreamCaptureMode*>(mode)));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return in_context([&] { return cuStreamBeginCapture(stream, static_cast<CUstreamCaptureMode>(mode)); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                                              const cudaGraphNode_t* dependencies,
                                                              const cudaGraphEdgeData*, size_t count,
                                                              cudaStreamCaptureMode mode) {
  return in_context([&] {
    return cuStreamBeginCaptureToGraph(stream, graph, dependencies, nullptr, count,
                                       static_cast<CUstreamCaptureMode>(mode));
  });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return in_context([&] { return cuStreamEndCapture(stream, graph); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return report(cuStreamIsCapturing(stream, reinterpret_cast<CUstreamCaptureStatus*>(status)));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                                         unsigned long long* id, cudaGraph_t* graph,
                                                         const cudaGraphNode_t** dependencies,
                                                         const cudaGraphEdgeData** edges, size_t* count) {
  cuuint64_t driver_id = 0;
  if (edges) *edges = nullptr;
  const CUresult error = cuStreamGetCaptureInfo(stream, reinterpret_cast<CUstreamCaptureStatus*>(status), &driver_id,
                                                graph, dependencies, nullptr, count);
  if (id) *id = driver_id;
  return report(error);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t* dependencies,
                                                                    const cudaGraphEdgeData*, size_t count,
                                                                    unsigned flags) {
  return report(cuStreamUpdateCaptureDependencies(stream, dependencies, nullptr, count, flags));
}

OOMDIAG_ENTRY_POINT cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags) {
  return report(cuGraphCreate(graph, flags));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return report(cuGraphDestroy(graph)); }
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                                      const cudaGraphNode_t* dependencies, size_t count) {
  return report(cuGraphAddEmptyNode(node, graph, dependencies, count));
}
/// The two parameter structs begin alike, with the type, which is all that is looked at.
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphAddNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                                 const cudaGraphNode_t* dependencies, const cudaGraphEdgeData*,
                                                 size_t count, cudaGraphNodeParams* parameters) {
  return report(
      cuGraphAddNode(node, graph, dependencies, nullptr, count, reinterpret_cast<CUgraphNodeParams*>(parameters)));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return report(cuGraphGetNodes(graph, nodes, count));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes,
                                                             cudaGraphEdgeData*, size_t* count) {
  return report(cuGraphNodeGetDependencies(node, nodes, nullptr, count));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  return report(cuGraphNodeGetType(node, reinterpret_cast<CUgraphNodeType*>(type)));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                              unsigned long long flags) {
  return report(cuGraphInstantiateWithFlags(executable, graph, flags));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                     unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphInstantiateWithParams(cudaGraphExec_t* executable, cudaGraph_t graph,
                                                               cudaGraphInstantiateParams* parameters) {
  parameters->result_out = cudaGraphInstantiateSuccess;
  return cudaGraphInstantiateWithFlags(executable, graph, parameters->flags);
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return in_context([&] { return cuGraphLaunch(executable, stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
  return report(cuGraphUpload(executable, stream));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return report(cuGraphExecDestroy(executable));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char* path, unsigned flags) {
  return report(cuGraphDebugDotPrint(graph, path, flags));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaUserObjectCreate(cudaUserObject_t* handle, void* object, cudaHostFn_t destroy,
                                                     unsigned references, unsigned flags) {
  return report(cuUserObjectCreate(handle, object, destroy, references, flags));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  return report(cuUserObjectRelease(object, count));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count,
                                                          unsigned flags) {
  return report(cuGraphRetainUserObject(graph, object, count, flags));
}
