#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>
#include <type_traits>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/stubs/answers.h"

// What the lines of the math libraries' entry_points.txt call: a handle is an object of ours that remembers settings.

namespace oomdiag {

/// Bytes of a number of this type; those of less than a byte, which no library here takes alone, count as one.
inline int64_t bytes_of(cudaDataType type) {
  switch (static_cast<int>(type)) {
    case CUDA_C_64F:
    case CUDA_C_64I:
    case CUDA_C_64U:
      return 16;
    case CUDA_R_64F:
    case CUDA_R_64I:
    case CUDA_R_64U:
    case CUDA_C_32F:
    case CUDA_C_32I:
    case CUDA_C_32U:
      return 8;
    case CUDA_R_32F:
    case CUDA_R_32I:
    case CUDA_R_32U:
    case CUDA_C_16F:
    case CUDA_C_16BF:
    case CUDA_C_16I:
    case CUDA_C_16U:
      return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF:
    case CUDA_R_16I:
    case CUDA_R_16U:
    case CUDA_C_8I:
    case CUDA_C_8U:
      return 2;
    default:
      return 1;
  }
}

/// What the first handle of a library makes, as the real one does: the context, and code.
template <typename Status>
Status use_library(Status no_memory, Status not_initialized) {
  cudaFree(nullptr);
  const CUresult error = oomdiag_device_use_library();
  return error ? error == CUDA_ERROR_OUT_OF_MEMORY ? no_memory : not_initialized : Status{};
}

template <typename Object, typename Handle, typename Status>
Status create(Handle* handle, Status no_memory, Status not_initialized) {
  if (const Status error = use_library(no_memory, not_initialized); error != Status{}) return error;
  *handle = reinterpret_cast<Handle>(new Object);
  return Status{};
}

template <typename Object, typename Field, typename Handle>
Success set(Field Object::*field, Handle handle, std::type_identity_t<Field> value) {
  reinterpret_cast<Object*>(handle)->*field = value;
  return {};
}

template <typename Object, typename Field, typename Handle>
Success get(Field Object::*field, Handle handle, Field* place) {
  *place = reinterpret_cast<Object*>(handle)->*field;
  return {};
}

/// A kernel on the stream of a handle.
template <typename Object, typename Handle, typename Status>
Status submit_kernel(Handle handle, Status not_initialized, Status failed) {
  if (!handle) return not_initialized;
  const auto stream = reinterpret_cast<Object*>(handle)->stream;
  return oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_KERNEL) ? failed : Status{};
}

}  // namespace oomdiag
