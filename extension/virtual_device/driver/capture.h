#pragma once

#include <cuda.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "extension/virtual_device/driver/graph.h"
#include "extension/virtual_device/driver/stream.h"

// Stream capture: a graph that grows by one node for each piece of work. Which nodes the next one follows is kept by
// stream; recording an event takes them along, and waiting for it draws another stream into the capture. The rules and
// their error codes are those of the CUDA programming guide, "CUDA Graphs", and of cuda.h.

namespace oomdiag {

struct Capture {
  uint64_t id = 0;
  Graph* graph = nullptr;
  bool owns_graph = true;  ///< false after cuStreamBeginCaptureToGraph
  Stream* origin = nullptr;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  bool is_invalid = false;
  std::vector<Stream*> streams;
};

CUresult begin_capture(CUstream stream, CUstreamCaptureMode mode, Graph* graph, std::vector<GraphNode*> dependencies);
CUresult end_capture(CUstream stream, CUgraph* graph);

/// The stream's capture ends, if it has one; gives the graph, if that is nobody else's, which must go under no lock.
std::unique_ptr<Graph> abandon_capture(Stream& stream);

/// Whether any stream of the process is being captured: one atomic load, for the paths that ask on every launch.
bool is_any_capturing() noexcept;

/// Adds what every graph that is being captured will do with contents.
void capture_action(const std::function<void()>& action);

/// Adds a node to the stream's capture, if it has one.
void capture_work(Stream& stream, CUgraphNodeType type);

/// Marks the stream's capture as failed: something was asked of it that a capture cannot answer.
CUresult invalidate_capture(Stream& stream);

CUresult record_event(Event& event, Stream& stream, unsigned flags);
CUresult wait_for_event(Stream& stream, Event& event, unsigned flags);

/// Whether the event stands for nodes of a capture that is still going on; that capture then fails.
bool spoils_capture(const Event& event);

/// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, and the capture in the way fails, where this thread may not make an unsafe
/// call now.
CUresult check_unsafe_call();

/// Gives this thread `mode` and returns the one it had.
CUstreamCaptureMode exchange_capture_mode(CUstreamCaptureMode mode);

}  // namespace oomdiag
