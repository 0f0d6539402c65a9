// Streams, events and the work that is submitted to them (stream.h, capture.h).

#include <cuda.h>

#include <algorithm>
#include <ctime>

#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/clock.h"
#include "extension/virtual_device/driver/context.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/forward.h"
#include "extension/virtual_device/driver/pool.h"
#include "extension/virtual_device/driver/stream.h"
#include "extension/virtual_device/entry_point.h"

using oomdiag::current_context;
using oomdiag::Event;
using oomdiag::find_event;
using oomdiag::find_stream;
using oomdiag::Stream;

namespace {

/// Asking whether work is done breaks a capture: captured work is never done.
CUresult check_not_capturing(CUstream handle) {
  Stream* stream = find_stream(handle);
  if (!stream) return oomdiag::stream_error(handle);
  if (!oomdiag::is_any_capturing()) return CUDA_SUCCESS;
  std::lock_guard guard(oomdiag::stream_lock());
  return stream->capture ? oomdiag::invalidate_capture(*stream) : CUDA_SUCCESS;
}

bool has_time(const Event& event) { return event.recorded_ns >= 0 && !(event.flags & CU_EVENT_DISABLE_TIMING); }

}  // namespace

namespace oomdiag {

CUresult create_stream(CUstream* handle, unsigned flags, int priority) {
  if (const CUresult error = check_initialized()) return error;
  if (const CUresult error = check_context()) return error;
  *handle = stream_handle(&add_stream(*current_context(), flags, std::clamp(priority, -5, 0)));
  return CUDA_SUCCESS;
}

}  // namespace oomdiag

CUresult oomdiag_device_check_capture() { return oomdiag::check_unsafe_call(); }

namespace {

CUresult submit(CUstream handle, CUgraphNodeType type, const oomdiag::Work& work) {
  Stream* stream = find_stream(handle);
  if (!stream) return oomdiag::stream_error(handle);
  if (type == CU_GRAPH_NODE_TYPE_KERNEL) [[likely]] {
    if (const CUresult error = oomdiag::load_kernels(*stream->context)) return error;
  }
  oomdiag::capture_work(*stream, type);
  oomdiag::add_work(*stream, work);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult oomdiag_device_submit(CUstream stream, CUgraphNodeType type) { return submit(stream, type, {}); }

CUresult oomdiag_device_launch(CUstream stream, double threads) {
  return submit(stream, CU_GRAPH_NODE_TYPE_KERNEL, oomdiag::work_of_threads(threads));
}

CUresult oomdiag_device_compute(CUstream stream, double memory_bytes, double flops) {
  return submit(stream, CU_GRAPH_NODE_TYPE_KERNEL, {.memory_bytes = memory_bytes, .flops = flops});
}

CUresult oomdiag_device_spin(CUstream handle, int64_t cycles) {
  if (const CUresult error = oomdiag_device_launch(handle, 1)) return error;
  Stream& stream = *find_stream(handle);
  oomdiag::add_time(stream, oomdiag::time_of_cycles(stream.context->device->gpu, cycles));
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuStreamDestroy(CUstream handle) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
    return CUDA_ERROR_INVALID_HANDLE;
  std::lock_guard guard(oomdiag::stream_lock());
  Stream* stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return oomdiag::invalidate_capture(*stream);
  oomdiag::drop_stream(*stream);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuStreamQuery(CUstream handle) {
  if (const CUresult error = check_not_capturing(handle)) return error;
  return oomdiag::is_pending(oomdiag::end_of(*find_stream(handle))) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuStreamSynchronize(CUstream handle) {
  if (const CUresult error = check_not_capturing(handle)) return error;
  oomdiag::wait_until(oomdiag::end_of(*find_stream(handle)));
  oomdiag::trim_pools();
  return handle ? CUDA_SUCCESS : oomdiag::check_unsafe_call();
}

OOMDIAG_ENTRY_POINT CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  Stream* stream = find_stream(handle);
  if (!stream) return oomdiag::stream_error(handle);
  return find_event(event) ? oomdiag::wait_for_event(*stream, *find_event(event), flags) : CUDA_ERROR_INVALID_HANDLE;
}

/// Attributes stay at their defaults.
OOMDIAG_ENTRY_POINT CUresult cuStreamGetAttribute(CUstream stream, CUstreamAttrID attribute, CUstreamAttrValue* value) {
  *value = {};
  return attribute == CU_STREAM_ATTRIBUTE_PRIORITY ? cuStreamGetPriority(stream, &value->priority) : CUDA_SUCCESS;
}

/// Captured, it becomes a node and is not called; otherwise all work before it is done already.
OOMDIAG_ENTRY_POINT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* argument) {
  Stream* stream = find_stream(handle);
  if (!stream) return oomdiag::stream_error(handle);
  const bool is_captured = stream->capture;
  oomdiag::capture_work(*stream, CU_GRAPH_NODE_TYPE_HOST);
  if (!is_captured) function(argument);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback function, void* argument, unsigned) {
  if (const CUresult error = check_not_capturing(stream)) return error;
  function(stream, CUDA_SUCCESS, argument);
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuEventCreate(CUevent* handle, unsigned flags) {
  if (const CUresult error = oomdiag::check_initialized()) return error;
  if (const CUresult error = oomdiag::check_context()) return error;
  *handle = oomdiag::event_handle(&oomdiag::add_event(*current_context(), flags));
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuEventDestroy(CUevent event) {
  if (!find_event(event)) return CUDA_ERROR_INVALID_HANDLE;
  oomdiag::drop_event(*find_event(event));
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned flags) {
  Stream* stream = find_stream(handle);
  if (!stream) return oomdiag::stream_error(handle);
  return find_event(event) ? oomdiag::record_event(*find_event(event), *stream, flags) : CUDA_ERROR_INVALID_HANDLE;
}

OOMDIAG_ENTRY_POINT CUresult cuEventQuery(CUevent handle) {
  const Event* event = find_event(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (oomdiag::spoils_capture(*event)) return CUDA_ERROR_CAPTURED_EVENT;
  if (const CUresult error = oomdiag::check_unsafe_call()) return error;
  return oomdiag::is_pending(event->recorded_ns) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuEventSynchronize(CUevent handle) {
  const Event* event = find_event(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (oomdiag::spoils_capture(*event)) return CUDA_ERROR_CAPTURED_EVENT;
  oomdiag::wait_until(event->recorded_ns);
  oomdiag::trim_pools();
  return CUDA_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  const Event* first = find_event(start);
  const Event* last = find_event(end);
  const bool is_timed = first && last && has_time(*first) && has_time(*last);
  if (!is_timed || first->context->device != last->context->device) return CUDA_ERROR_INVALID_HANDLE;
  *milliseconds = static_cast<float>(last->recorded_ns - first->recorded_ns) / 1e6f;
  return CUDA_SUCCESS;
}

// Writes of numbers by a stream, and its waits for them (PyTorch's symmetric memory, NVSHMEM). Who would write a number that
// is waited for does not run, so that a wait is over at once.
OOMDIAG_ENTRY_POINT CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
                                                unsigned) {
  CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
  for (unsigned i = 0; i < count && !error; ++i) {
    const auto& write_value = operations[i].writeValue;
    if (write_value.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      error = oomdiag::write_value(stream, write_value.address, write_value.value);
    } else if (write_value.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
      error = oomdiag::write_value(stream, write_value.address, write_value.value64);
    }
  }
  return error;
}
