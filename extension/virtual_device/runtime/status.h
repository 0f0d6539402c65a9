#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

// The runtime is thin, as the real one is: it keeps the thread's last error and gives a thread the primary context of
// its device at the first call that needs one, and leaves the rest to the driver, whose error numbers it shares.
//
// It has the real library's SONAME and its version node, libcudart.so.13 (for programs of CUDA 12 libcudart.so.12): then a preloaded copy is the one that
// everybody binds to and that dlopen finds, without warnings. With another SONAME, or without versions, the real
// library is mapped too, and a program that opens it by name reaches it.

namespace oomdiag {

/// The error that cudaGetLastError will give to this thread.
extern thread_local cudaError_t last_error;

/// Remembers an error; passes the code on.
inline cudaError_t report(int code) {
  if (code) [[unlikely]]
    last_error = static_cast<cudaError_t>(code);
  return static_cast<cudaError_t>(code);
}

inline cudaError_t report(CUresult code) { return report(static_cast<int>(code)); }

/// cuInit, once.
CUresult initialize();

/// The thread's device: that of its current context, else the one it chose, else 0. Creates nothing.
int current_ordinal();

/// Makes the primary context of the device, where there is none, and makes it the thread's.
CUresult choose_device(int ordinal);

/// Makes sure that the thread has a context, which the first real use of a device makes, and the first one
/// after a reset again.
CUresult bind_context();

/// Runs a driver call in a context: `return in_context([&] { return cuMemAlloc(…); });`
template <typename Call>
cudaError_t in_context(Call call) {
  const CUresult error = bind_context();
  return report(error ? error : call());
}

}  // namespace oomdiag
