#pragma once

#include <cuda.h>

#include <functional>

#include "extension/virtual_device/driver/array.h"
#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/launch_bounds.h"
#include "extension/virtual_device/driver/mapping.h"
#include "extension/virtual_device/driver/memory.h"
#include "extension/virtual_device/driver/module.h"
#include "extension/virtual_device/driver/small_heap.h"
#include "extension/virtual_device/driver/stream.h"

// What the lines of entry_points.txt call, beside stubs/answers.h and the headers of this folder.

namespace oomdiag {

/// Calls another function of the driver.
template <typename... Parameters, typename... Values>
CUresult same(CUresult (*function)(Parameters...), Values... values) {
  return function((Parameters)values...);
}

/// What a stream or a device says by one of its fields, or a function of it.
template <typename Value, typename Read>
CUresult tell(CUstream handle, Value* place, Read read) {
  const Stream* stream = find_stream(handle);
  if (!stream) return stream_error(handle);
  *place = std::invoke(read, *stream);
  return CUDA_SUCCESS;
}
template <typename Value, typename Read>
CUresult tell(CUdevice ordinal, Value* place, Read read) {
  const Device* device = find_device(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  *place = std::invoke(read, *device);
  return CUDA_SUCCESS;
}

int gpu_attribute(const Device& device, CUdevice_attribute attribute);
CUresult create_stream(CUstream* stream, unsigned flags, int priority);

/// Arrays, and the objects of textures and surfaces (api_array.cpp).
CUresult create_array(CUarray* array, const CUDA_ARRAY3D_DESCRIPTOR& shape);
CUresult create_view(unsigned long long* object, const View& view);

CUresult launch(CUfunction kernel, Shape grid, Shape block, unsigned shared_bytes, CUstream stream, void** arguments);

/// The largest block of those with which the most threads are resident, and the grid that fills the GPU with it.
CUresult find_block(int* grid, int* block, CUoccupancyB2DSize shared_of, size_t shared_bytes, int most_threads);

/// A write of a number by a stream.
template <typename Number>
CUresult write_value(CUstream stream, CUdeviceptr to, Number value) {
  if (const CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP)) return error;
  oomdiag_device_copy(reinterpret_cast<void*>(to), &value, sizeof value);
  return CUDA_SUCCESS;
}

/// An address, in either form in which the driver takes it.
struct Address {
  Address(CUdeviceptr address) : pointer(reinterpret_cast<void*>(address)) {}
  Address(const void* address) : pointer(const_cast<void*>(address)) {}

  void* pointer;
};

/// Copies and sets (api_copy.cpp). What is on a stream is done now, or, where that is being captured, whenever the graph runs.
CUresult copy_now(Address to, Address from, size_t bytes);
CUresult copy_on(Address to, Address from, size_t bytes, CUstream stream);
CUresult copy_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, CUstream stream);
CUresult set_on(CUstream stream, Address to, unsigned value, size_t number_bytes, size_t count);
template <typename Number>
CUresult set(CUdeviceptr to, Number value, size_t count, CUstream stream = nullptr) {
  return set_on(stream, to, value, sizeof value, count);
}

/// The same of rows and planes (api_memcpy_2d_3d.cpp), always done now.
CUresult copy_2d(const CUDA_MEMCPY2D* copy, CUstream stream = nullptr);
CUresult copy_3d(const CUDA_MEMCPY3D* copy, CUstream stream = nullptr);
CUresult copy_3d(const CUDA_MEMCPY3D_PEER* copy, CUstream stream = nullptr);
CUresult set_rows(CUstream stream, Address to, size_t pitch, unsigned value, size_t number_bytes, size_t width,
                  size_t height);
template <typename Number>
CUresult set_2d(CUdeviceptr to, size_t pitch, Number value, size_t width, size_t height, CUstream stream = nullptr) {
  return set_rows(stream, to, pitch, value, sizeof value, width, height);
}

}  // namespace oomdiag
