#pragma once

#include <cuda.h>

#include "extension/virtual_device/driver/array.h"

namespace oomdiag {

/// Calls another function of the driver: what the functions of entry_points.txt do that do anything.
template <typename... Parameters, typename... Values>
CUresult same(CUresult (*function)(Parameters...), Values... values) {
  return function((Parameters)values...);
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
