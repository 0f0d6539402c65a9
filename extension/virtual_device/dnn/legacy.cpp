// Sizes that the old, handle-taking API of cuDNN gives out, and that the real library does not give without a device:
// entry_points.txt has each as an estimate. What takes more than a line is here.

#include "extension/virtual_device/dnn/forward.h"

size_t oomdiag::count_dropout_bytes() {
  constexpr size_t kStateBytes = 16;
  int ordinal = 0;
  int multiprocessors = 0;
  int threads = 0;
  cudaGetDevice(&ordinal);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, ordinal);
  return static_cast<size_t>(multiprocessors) * static_cast<size_t>(threads) * kStateBytes;
}
