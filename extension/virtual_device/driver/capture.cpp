#include "extension/virtual_device/driver/capture.h"

#include <algorithm>
#include <set>
#include <utility>

#include "extension/virtual_device/driver/clock.h"
#include "extension/virtual_device/driver/graph.h"
#include "extension/virtual_device/driver/stream.h"

namespace oomdiag {
namespace {

std::atomic<int> live_count = 0;
auto& live = *new std::vector<Capture*>;  // under stream_lock(), never destroyed
uint64_t next_id = 1;
thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

Capture* find_live(uint64_t id) {
  const auto found = std::find_if(live.begin(), live.end(), [id](const Capture* capture) { return capture->id == id; });
  return found == live.end() ? nullptr : *found;
}

/// The nodes from which the origin stream's next node could be reached.
std::set<const GraphNode*> collect_joined(const Stream& origin) {
  std::set<const GraphNode*> joined;
  std::vector<const GraphNode*> open(origin.dependencies.begin(), origin.dependencies.end());
  while (!open.empty()) {
    const GraphNode* node = open.back();
    open.pop_back();
    if (joined.insert(node).second) open.insert(open.end(), node->dependencies.begin(), node->dependencies.end());
  }
  return joined;
}

/// A stream that was drawn into the capture must be waited for by the origin before the end.
bool is_joined(const Capture& capture) {
  const auto joined = collect_joined(*capture.origin);
  for (const Stream* stream : capture.streams) {
    if (stream == capture.origin) continue;
    for (const GraphNode* node : stream->dependencies) {
      if (!joined.contains(node)) return false;
    }
  }
  return true;
}

void close_capture(Capture* capture) {
  for (Stream* stream : capture->streams) {
    stream->capture = nullptr;
    stream->dependencies.clear();
  }
  std::erase(live, capture);
  --live_count;
}

void add_dependency(Stream& stream, GraphNode* node) {
  auto& list = stream.dependencies;
  if (std::find(list.begin(), list.end(), node) == list.end()) list.push_back(node);
}

/// The stream joins the event's capture and follows what the event stands for.
CUresult join_capture(Stream& stream, const Event& event, Capture* capture) {
  if (stream.capture && stream.capture != capture) {
    invalidate_capture(stream);
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (!stream.capture) {
    stream.capture = capture;
    stream.dependencies.clear();
    capture->streams.push_back(&stream);
  }
  for (GraphNode* node : event.dependencies) add_dependency(stream, node);
  return CUDA_SUCCESS;
}

/// CUDA programming guide, "Prohibited and unhandled operations", and cudaThreadExchangeStreamCaptureMode.
bool forbids_unsafe_call(const Capture& capture) {
  if (capture.thread == std::this_thread::get_id()) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

}  // namespace

bool is_any_capturing() noexcept { return live_count.load(std::memory_order_relaxed) > 0; }

void capture_action(const std::function<void()>& action) {
  std::lock_guard guard(stream_lock());
  for (Capture* capture : live) capture->graph->body->actions.push_back(action);
}

CUresult begin_capture(CUstream handle, CUstreamCaptureMode mode, Graph* graph, std::vector<GraphNode*> dependencies) {
  std::lock_guard guard(stream_lock());
  Stream* stream = find_stream(handle);
  if (!stream) return stream_error(handle);
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  auto* capture = new Capture{.id = next_id++,
                              .graph = graph ? graph : new Graph,
                              .owns_graph = !graph,
                              .origin = stream,
                              .mode = mode,
                              .thread = std::this_thread::get_id(),
                              .is_invalid = false,
                              .streams = {stream}};
  stream->capture = capture;
  stream->dependencies = std::move(dependencies);
  live.push_back(capture);
  ++live_count;
  return CUDA_SUCCESS;
}

CUresult end_capture(CUstream handle, CUgraph* graph) {
  std::unique_ptr<Graph> dropped;  // after the lock
  std::lock_guard guard(stream_lock());
  *graph = nullptr;
  Stream* stream = find_stream(handle);
  if (!stream || !stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  Capture* capture = stream->capture;
  if (capture->origin != stream) {
    capture->is_invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  CUresult result = CUDA_SUCCESS;
  if (!is_joined(*capture)) result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  if (capture->is_invalid) result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  close_capture(capture);
  if (result == CUDA_SUCCESS) *graph = graph_handle(capture->graph);
  if (result != CUDA_SUCCESS && capture->owns_graph) dropped.reset(capture->graph);
  delete capture;
  return result;
}

std::unique_ptr<Graph> abandon_capture(Stream& stream) {
  std::lock_guard guard(stream_lock());
  const std::unique_ptr<Capture> capture(stream.capture);
  if (!capture) return nullptr;
  close_capture(capture.get());
  return std::unique_ptr<Graph>(capture->owns_graph ? capture->graph : nullptr);
}

void capture_work(Stream& stream, CUgraphNodeType type) {
  if (!is_any_capturing()) return;
  std::lock_guard guard(stream_lock());
  if (!stream.capture) return;
  GraphNode* node = stream.capture->graph->body->add_node(type, stream.dependencies);
  stream.dependencies.assign(1, node);
}

CUresult invalidate_capture(Stream& stream) {
  stream.capture->is_invalid = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult record_event(Event& event, Stream& stream, unsigned flags) {
  std::lock_guard guard(stream_lock());
  const bool is_external = flags & CU_EVENT_RECORD_EXTERNAL;
  if (stream.capture && !is_external) {
    event.capture_id = stream.capture->id;
    event.dependencies = stream.dependencies;
    event.recorded_ns = -1;
    return CUDA_SUCCESS;
  }
  capture_work(stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
  if (event.context != stream.context) return CUDA_ERROR_INVALID_HANDLE;
  event.capture_id = 0;
  event.dependencies.clear();
  event.recorded_ns = std::max(host_time_ns(), end_of(stream));
  return CUDA_SUCCESS;
}

CUresult wait_for_event(Stream& stream, Event& event, unsigned flags) {
  if (!is_any_capturing() && !is_clocked()) return CUDA_SUCCESS;
  std::lock_guard guard(stream_lock());
  const bool is_external = flags & CU_EVENT_WAIT_EXTERNAL;
  Capture* capture = event.capture_id ? find_live(event.capture_id) : nullptr;
  if (capture && !is_external) return join_capture(stream, event, capture);
  if (stream.capture && event.recorded_ns >= 0 && !is_external) {
    invalidate_capture(stream);
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (is_external) capture_work(stream, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
  if (!stream.capture) stream.end_ns = std::max<int64_t>(stream.end_ns, event.recorded_ns);
  return CUDA_SUCCESS;
}

bool spoils_capture(const Event& event) {
  if (!is_any_capturing()) return false;
  std::lock_guard guard(stream_lock());
  Capture* capture = event.capture_id ? find_live(event.capture_id) : nullptr;
  if (capture) capture->is_invalid = true;
  return capture;
}

CUresult check_unsafe_call() {
  if (!is_any_capturing() || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  std::lock_guard guard(stream_lock());
  for (Capture* capture : live) {
    if (!forbids_unsafe_call(*capture)) continue;
    capture->is_invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUstreamCaptureMode exchange_capture_mode(CUstreamCaptureMode mode) { return std::exchange(thread_mode, mode); }

}  // namespace oomdiag
