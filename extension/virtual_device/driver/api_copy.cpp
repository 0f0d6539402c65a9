// Copies and sets, with the contents that contents.cpp keeps. Those are moved at once, whatever the clocks say.

#include <cuda.h>

#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/clock.h"
#include "extension/virtual_device/driver/copies.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/driver/stream.h"
#include "extension/virtual_device/entry_point.h"

namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

/// Within a GPU a copy reads and writes its memory; every other one goes over the bus.
oomdiag::Work work_of_copy(const void* to, const void* from, size_t bytes) {
  const auto target = oomdiag::find_range(to);
  const auto source = oomdiag::find_range(from);
  const auto is_on_gpu = [](const auto& range) { return range && range->kind == oomdiag::MemoryKind::device; };
  const bool is_within = is_on_gpu(target) && is_on_gpu(source) && target->device == source->device;
  const auto amount = static_cast<double>(bytes);
  return is_within ? oomdiag::Work{.memory_bytes = 2 * amount} : oomdiag::Work{.bus_bytes = amount};
}

/// Puts the copy onto the stream's clock; where the host's side is pageable, the host waits for it.
void pass_time(oomdiag::Stream& stream, const void* to, const void* from, size_t bytes) {
  if (!oomdiag::is_clocked()) return;
  oomdiag::add_work(stream, work_of_copy(to, from, bytes));
  if (!oomdiag::find_range(to) || !oomdiag::find_range(from)) oomdiag::wait_until(oomdiag::end_of(stream));
}

CUresult copy_now(void* to, const void* from, size_t bytes) {
  if (const CUresult error = oomdiag::check_unsafe_call()) return error;
  oomdiag::Stream* stream = oomdiag::find_stream(nullptr);
  if (!stream) return oomdiag::stream_error(nullptr);
  if (!oomdiag::can_copy(to, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  pass_time(*stream, to, from, bytes);
  oomdiag::wait_until(oomdiag::end_of(*stream));
  oomdiag_device_copy(to, from, bytes);
  return CUDA_SUCCESS;
}

/// Captured copies must not touch pageable memory.
CUresult check_captured_copy(CUstream handle, const void* to, const void* from) {
  oomdiag::Stream* stream = oomdiag::find_stream(handle);
  if (!stream || !stream->capture || (oomdiag::find_range(to) && oomdiag::find_range(from))) return CUDA_SUCCESS;
  return oomdiag::invalidate_capture(*stream);
}

/// Does it now, or, on a stream that is being captured, whenever the graph runs: `act` then finds what is there by then.
template <typename Act>
void act_on(oomdiag::Stream& stream, Act act) {
  std::unique_lock guard(oomdiag::stream_lock(), std::defer_lock);
  if (oomdiag::is_any_capturing()) guard.lock();
  if (guard.owns_lock() && stream.capture) {
    stream.capture->graph->body->actions.push_back(act);
    return;
  }
  if (guard.owns_lock()) guard.unlock();
  act();
}

CUresult copy_on(CUstream stream, void* to, const void* from, size_t bytes) {
  if (const CUresult error = check_captured_copy(stream, to, from)) return error;
  oomdiag::Stream* found = oomdiag::find_stream(stream);
  if (!found) return oomdiag::stream_error(stream);
  if (!oomdiag::can_copy(to, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  oomdiag::capture_work(*found, CU_GRAPH_NODE_TYPE_MEMCPY);
  pass_time(*found, to, from, bytes);
  act_on(*found, [to, from, bytes] {
    if (oomdiag::can_copy(to, from, bytes)) oomdiag_device_copy(to, from, bytes);
  });
  return CUDA_SUCCESS;
}

CUresult set_on(CUstream stream, CUdeviceptr to, unsigned value, size_t number_bytes, size_t count) {
  const size_t bytes = count * number_bytes;
  if (!oomdiag::can_copy_to(pointer(to), bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_MEMSET)) return error;
  act_on(*oomdiag::find_stream(stream), [=] {
    if (oomdiag::can_copy_to(pointer(to), bytes)) oomdiag::set_numbers(pointer(to), value, number_bytes, count);
  });
  return CUDA_SUCCESS;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_now(pointer(to), pointer(from), bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return copy_now(pointer(to), from, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return copy_now(to, pointer(from), bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_now(pointer(to), pointer(from), bytes);
}

OOMDIAG_ENTRY_POINT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_on(stream, pointer(to), pointer(from), bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return copy_on(stream, pointer(to), from, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_on(stream, to, pointer(from), bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_on(stream, pointer(to), pointer(from), bytes);
}

OOMDIAG_ENTRY_POINT CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t bytes) {
  return set_on(nullptr, to, value, 1, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  return set_on(stream, to, value, 1, bytes);
}
OOMDIAG_ENTRY_POINT CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t words) {
  return set_on(nullptr, to, value, 4, words);
}
OOMDIAG_ENTRY_POINT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t words, CUstream stream) {
  return set_on(stream, to, value, 4, words);
}
