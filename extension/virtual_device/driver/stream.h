#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/graph.h"
#include "extension/virtual_device/driver/locks.h"

// Streams and events. Work does nothing; what remains of them is identity, which PyTorch keys its blocks and workspaces
// by, the times at which work would be done (clock.h), and capture (capture.h).

namespace oomdiag {

struct Capture;

struct Stream {
  Context* context = nullptr;  ///< null once it is destroyed
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;                         ///< 0: the legacy stream of its context
  std::atomic<int64_t> end_ns = 0;         ///< when its work will be done
  Capture* capture = nullptr;              ///< null unless it is being captured
  std::vector<GraphNode*> dependencies{};  ///< what the next captured node will follow
};

struct Event {
  Context* context = nullptr;  ///< null once it is destroyed
  unsigned flags = 0;
  int64_t recorded_ns = -1;                ///< when the work before it is done; -1: not recorded, or into a capture
  uint64_t capture_id = 0;                 ///< 0 unless it was recorded into a capture
  std::vector<GraphNode*> dependencies{};  ///< the nodes it then stands for
};

/// Guards streams, events, captures and graphs. Recursive: what is done under it calls each other.
StreamsLock& stream_lock() noexcept;

/// The stream behind a handle; 0, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are the current context's default stream. Null where
/// there is no current context or the stream is destroyed; stream_error gives the reason.
Stream* find_stream(CUstream handle) noexcept;
CUresult stream_error(CUstream handle) noexcept;

/// The event behind a handle; null for none, and for one that is destroyed.
Event* find_event(CUevent handle) noexcept;

Stream& add_stream(Context& context, unsigned flags, int priority);
Event& add_event(Context& context, unsigned flags);

/// The handle is no longer used. It may be given out again.
void drop_stream(Stream& stream);
void drop_event(Event& event);

/// Drops all streams and events of the context, and the captures of those; nothing is pending on its legacy stream.
void drop_streams_of(Context& context);

inline CUstream stream_handle(Stream* stream) { return reinterpret_cast<CUstream>(stream); }
inline CUevent event_handle(Event* event) { return reinterpret_cast<CUevent>(event); }

}  // namespace oomdiag
