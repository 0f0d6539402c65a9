#pragma once

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

}  // namespace oomdiag
