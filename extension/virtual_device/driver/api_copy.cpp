// Copies and sets (rows of entry_points.txt), with the contents that contents.cpp keeps. Those are moved at once, whatever the clocks say.

#include <cuda.h>

#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/clock.h"
#include "extension/virtual_device/driver/copies.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/forward.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/driver/stream.h"

namespace oomdiag {
namespace {

/// Within a GPU a copy reads and writes its memory; every other one goes over the bus.
Work work_of_copy(const void* to, const void* from, size_t bytes) {
  const auto target = find_range(to);
  const auto source = find_range(from);
  const auto is_on_gpu = [](const auto& range) { return range && range->kind == MemoryKind::device; };
  const bool is_within = is_on_gpu(target) && is_on_gpu(source) && target->device == source->device;
  const auto amount = static_cast<double>(bytes);
  return is_within ? Work{.memory_bytes = 2 * amount} : Work{.bus_bytes = amount};
}

/// Puts the copy onto the stream's clock; where the host's side is pageable, the host waits for it.
void pass_time(Stream& stream, const void* to, const void* from, size_t bytes) {
  if (!is_clocked()) return;
  add_work(stream, work_of_copy(to, from, bytes));
  if (!find_range(to) || !find_range(from)) wait_until(end_of(stream));
}

/// Captured copies must not touch pageable memory.
CUresult check_captured_copy(CUstream handle, const void* to, const void* from) {
  Stream* stream = find_stream(handle);
  if (!stream || !stream->capture || (find_range(to) && find_range(from))) return CUDA_SUCCESS;
  return invalidate_capture(*stream);
}

/// Does it now, or, on a stream that is being captured, whenever the graph runs: `act` then finds what is there by then.
template <typename Act>
void act_on(Stream& stream, Act act) {
  std::unique_lock guard(stream_lock(), std::defer_lock);
  if (is_any_capturing()) guard.lock();
  if (guard.owns_lock() && stream.capture) {
    stream.capture->graph->body->actions.push_back(act);
    return;
  }
  if (guard.owns_lock()) guard.unlock();
  act();
}

}  // namespace

CUresult copy_now(Address target, Address source, size_t bytes) {
  void* const to = target.pointer;
  const void* const from = source.pointer;
  if (const CUresult error = check_unsafe_call()) return error;
  Stream* stream = find_stream(nullptr);
  if (!stream) return stream_error(nullptr);
  if (!can_copy(to, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  pass_time(*stream, to, from, bytes);
  wait_until(end_of(*stream));
  oomdiag_device_copy(to, from, bytes);
  return CUDA_SUCCESS;
}

CUresult copy_on(Address target, Address source, size_t bytes, CUstream stream) {
  void* const to = target.pointer;
  const void* const from = source.pointer;
  if (const CUresult error = check_captured_copy(stream, to, from)) return error;
  Stream* found = find_stream(stream);
  if (!found) return stream_error(stream);
  if (!can_copy(to, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  capture_work(*found, CU_GRAPH_NODE_TYPE_MEMCPY);
  pass_time(*found, to, from, bytes);
  act_on(*found, [to, from, bytes] {
    if (can_copy(to, from, bytes)) oomdiag_device_copy(to, from, bytes);
  });
  return CUDA_SUCCESS;
}

CUresult copy_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, CUstream stream) {
  for (size_t i = 0; i < count; ++i) {
    if (const CUresult error = copy_on(to[i], from[i], bytes[i], stream)) return error;
  }
  return CUDA_SUCCESS;
}

CUresult set_on(CUstream stream, Address target, unsigned value, size_t number_bytes, size_t count) {
  void* const to = target.pointer;
  const size_t bytes = count * number_bytes;
  if (!can_copy_to(to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMSET)) return error;
  act_on(*find_stream(stream), [=] {
    if (can_copy_to(to, bytes)) set_numbers(to, value, number_bytes, count);
  });
  return CUDA_SUCCESS;
}

}  // namespace oomdiag
