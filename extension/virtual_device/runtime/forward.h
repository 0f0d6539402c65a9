#pragma once

#include "extension/virtual_device/runtime/array.h"
#include "extension/virtual_device/runtime/status.h"

// How the functions of entry_points.txt reach the driver. Its types are the runtime's under other names: pointers and handles
// are the same, enumerations share their numbers.

namespace oomdiag {

/// Calls a function of the driver with the runtime's values.
template <typename... Parameters, typename... Values>
CUresult call(CUresult (*function)(Parameters...), Values... values) {
  return function((Parameters)values...);  // any cast that there is
}

/// The same as the runtime does it: at once, once the driver is initialised, or in a context.
template <typename Function, typename... Values>
cudaError_t direct(Function* function, Values... values) {
  return report(call(function, values...));
}
template <typename Function, typename... Values>
cudaError_t initialized(Function* function, Values... values) {
  const CUresult error = initialize();
  return report(error ? error : call(function, values...));
}
template <typename Function, typename... Values>
cudaError_t context(Function* function, Values... values) {
  return in_context([&] { return call(function, values...); });
}

/// Calls another function of the runtime.
template <typename... Parameters, typename... Values>
cudaError_t runtime(cudaError_t (*function)(Parameters...), Values... values) {
  return function((Parameters)values...);
}

/// A launch, whose error for a shape is another than the driver's (launch.cpp).
cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, void** arguments,
                   cudaStream_t stream);

/// Copies and sets of rows and planes (copy.cpp, memcpy_2d_3d.cpp). Rows in an array begin `x` bytes into each of its rows.
CUresult copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                   cudaStream_t stream);
CUresult copy_3d(const cudaMemcpy3DParms* parameters, cudaStream_t stream);
CUresult copy_of_array(bool is_to_array, cudaArray_const_t array, size_t x, size_t y, const void* memory, size_t pitch,
                       size_t width, size_t height, cudaStream_t stream);
CUresult set_3d(cudaPitchedPtr memory, int value, cudaExtent extent, cudaStream_t stream);

/// The address and the size of a variable of the device, each where it is asked for (symbols.cpp).
CUresult place_variable(const void* symbol, void** address, size_t* bytes);

/// A copy to or from a variable: `copy` gets the address.
template <typename Copy>
cudaError_t at_symbol(const void* symbol, size_t offset, Copy copy) {
  void* address = nullptr;
  const cudaError_t error = context(place_variable, symbol, &address, nullptr);
  return error ? error : copy(static_cast<char*>(address) + offset);
}

}  // namespace oomdiag
