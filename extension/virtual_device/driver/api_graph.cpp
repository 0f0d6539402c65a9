// Capture and graphs. A graph is its nodes and their order; launching one does nothing more than launching its kernels
// did.

#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/clock.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/graph.h"
#include "extension/virtual_device/driver/memory_account.h"
#include "extension/virtual_device/driver/small_heap.h"
#include "extension/virtual_device/driver/stream.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::Context;
using oomdiag::find_graph;
using oomdiag::find_stream;
using oomdiag::Graph;
using oomdiag::GraphBody;
using oomdiag::GraphNode;
using oomdiag::Stream;
using oomdiag::UserObject;

namespace {

struct Executable {
  std::shared_ptr<GraphBody> body;
  Context* context = nullptr;
  uint64_t times_destroyed = 0;  ///< the context was, before this was made
  int64_t bytes = 0;             ///< of the GPU
};

GraphNode* find_node(CUgraphNode handle) { return reinterpret_cast<GraphNode*>(handle); }
CUgraphNode node_handle(GraphNode* node) { return reinterpret_cast<CUgraphNode>(node); }

std::vector<GraphNode*> find_nodes(const CUgraphNode* handles, size_t count) {
  std::vector<GraphNode*> nodes(count);
  std::transform(handles, handles + count, nodes.begin(), find_node);
  return nodes;
}

CUresult add_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                  CUgraphNodeType type) {
  std::lock_guard guard(oomdiag::stream_lock());
  *node = node_handle(find_graph(graph)->body->add_node(type, find_nodes(dependencies, count)));
  return CUDA_SUCCESS;
}

/// The convention of cuGraphGetNodes: a null list asks for the number, otherwise up to `count` are given.
template <typename List, typename ToPointer>
CUresult give_nodes(const List& list, ToPointer to_pointer, CUgraphNode* nodes, size_t* count) {
  const size_t present = list.size();
  for (size_t i = 0; nodes && i < std::min(*count, present); ++i) nodes[i] = node_handle(to_pointer(list[i]));
  *count = nodes ? std::min(*count, present) : present;
  return CUDA_SUCCESS;
}

/// All executables of a context together hold whole pages.
bool resize_graphs(Context& context, int64_t more) {
  std::lock_guard guard(oomdiag::memory_lock());
  const int64_t sum = context.graph_bytes + more;
  const int64_t pages = oomdiag::round_to_pages(sum) - oomdiag::round_to_pages(context.graph_bytes);
  if (pages > 0 && !oomdiag::charge(*context.device, pages)) return false;
  if (pages < 0) oomdiag::refund(*context.device, -pages);
  context.graph_bytes = sum;
  return true;
}

CUresult instantiate(CUgraphExec* executable, CUgraph graph) {
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  Context* context = oomdiag::current_context();
  if (!context) return oomdiag::check_context();
  auto made = std::make_unique<Executable>(
      Executable{.body = find_graph(graph)->body, .context = context, .times_destroyed = context->times_destroyed});
  made->bytes = made->body->executable_bytes();
  if (made->bytes > 0) oomdiag_device_note("estimate", "memory of captured CUDA graphs");
  if (!resize_graphs(*context, made->bytes)) {
    oomdiag::notify_oom(made->bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *executable = reinterpret_cast<CUgraphExec>(made.release());
  return CUDA_SUCCESS;
}

void print_dot(const GraphBody& body, FILE* file) {
  std::fprintf(file, "digraph dot {\n");
  for (const auto& node : body.nodes) {
    std::fprintf(file, "  \"%p\" [label=\"type %d\"];\n", static_cast<void*>(node.get()), node->type);
    for (const GraphNode* before : node->dependencies) {
      std::fprintf(file, "  \"%p\" -> \"%p\";\n", static_cast<const void*>(before), static_cast<void*>(node.get()));
    }
  }
  std::fprintf(file, "}\n");
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph,
                                                         const CUgraphNode* dependencies, const CUgraphEdgeData*,
                                                         size_t count, CUstreamCaptureMode mode) {
  return oomdiag::begin_capture(stream, mode, find_graph(graph), find_nodes(dependencies, count));
}

OOMDIAG_ENTRY_POINT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (!oomdiag::is_any_capturing()) return CUDA_SUCCESS;
  return cuStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

OOMDIAG_ENTRY_POINT CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id,
                                                    CUgraph* graph, const CUgraphNode** dependencies,
                                                    const CUgraphEdgeData** edges, size_t* count) {
  std::lock_guard guard(oomdiag::stream_lock());
  Stream* stream = find_stream(handle);
  const oomdiag::Capture* capture = stream ? stream->capture : nullptr;
  *status = !capture              ? CU_STREAM_CAPTURE_STATUS_NONE
            : capture->is_invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                  : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (edges) *edges = nullptr;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? oomdiag::graph_handle(capture->graph) : nullptr;
  if (dependencies)
    *dependencies = capture ? reinterpret_cast<const CUgraphNode*>(stream->dependencies.data()) : nullptr;
  if (count) *count = capture ? stream->dependencies.size() : 0;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode* nodes,
                                                               const CUgraphEdgeData*, size_t count, unsigned flags) {
  std::lock_guard guard(oomdiag::stream_lock());
  Stream* stream = find_stream(handle);
  if (!stream || !stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  const auto added = find_nodes(nodes, count);
  if (flags & CU_STREAM_SET_CAPTURE_DEPENDENCIES) stream->dependencies.clear();
  stream->dependencies.insert(stream->dependencies.end(), added.begin(), added.end());
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                                                 size_t count) {
  return add_node(node, graph, dependencies, count, CU_GRAPH_NODE_TYPE_EMPTY);
}

OOMDIAG_ENTRY_POINT CUresult cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                                            const CUgraphEdgeData*, size_t count, CUgraphNodeParams* parameters) {
  if (!parameters) return CUDA_ERROR_INVALID_VALUE;
  if (parameters->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) oomdiag_device_note("unsupported", "conditional graph nodes");
  if (parameters->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_ERROR_NOT_SUPPORTED;
  return add_node(node, graph, dependencies, count, parameters->type);
}

OOMDIAG_ENTRY_POINT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  return give_nodes(
      find_graph(graph)->body->nodes, [](const auto& node) { return node.get(); }, nodes, count);
}

OOMDIAG_ENTRY_POINT CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* nodes, CUgraphEdgeData*,
                                                        size_t* count) {
  return give_nodes(
      find_node(node)->dependencies, [](GraphNode* before) { return before; }, nodes, count);
}

OOMDIAG_ENTRY_POINT CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  *type = find_node(node)->type;
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  return instantiate(executable, graph);
}

OOMDIAG_ENTRY_POINT CUresult cuGraphInstantiateWithParams(CUgraphExec* executable, CUgraph graph,
                                                          CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
  parameters->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  return instantiate(executable, graph);
}

OOMDIAG_ENTRY_POINT CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_GRAPH)) return error;
  const auto body = reinterpret_cast<Executable*>(executable)->body;
  oomdiag::add_time(*find_stream(stream), body->time_ns);
  for (const auto& act : body->actions) act();
  return CUDA_SUCCESS;
}
OOMDIAG_ENTRY_POINT CUresult cuGraphExecDestroy(CUgraphExec executable) {
  const std::unique_ptr<Executable> gone(reinterpret_cast<Executable*>(executable));
  std::lock_guard guard(oomdiag::stream_lock());
  if (gone->times_destroyed == gone->context->times_destroyed) resize_graphs(*gone->context, -gone->bytes);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuGraphDebugDotPrint(CUgraph graph, const char* path, unsigned) {
  FILE* file = std::fopen(path, "w");
  if (!file) return CUDA_ERROR_OPERATING_SYSTEM;
  print_dot(*find_graph(graph)->body, file);
  std::fclose(file);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuDeviceGetGraphMemAttribute(CUdevice, CUgraphMem_attribute, void* value) {
  *static_cast<cuuint64_t*>(value) = 0;  // allocation nodes are not modelled: no graph holds memory of its own
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuUserObjectCreate(CUuserObject* handle, void* object, CUhostFn destroy,
                                                unsigned references, unsigned) {
  *handle =
      reinterpret_cast<CUuserObject>(new UserObject{.object = object, .destroy = destroy, .references = references});
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuUserObjectRelease(CUuserObject object, unsigned count) {
  oomdiag::drop_references(reinterpret_cast<UserObject*>(object), count);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject handle, unsigned count,
                                                     unsigned flags) {
  std::lock_guard guard(oomdiag::stream_lock());
  auto* object = reinterpret_cast<UserObject*>(handle);
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) object->references += count;
  auto& retained = find_graph(graph)->body->retained;
  retained.insert(retained.end(), count, object);
  return CUDA_SUCCESS;
}
