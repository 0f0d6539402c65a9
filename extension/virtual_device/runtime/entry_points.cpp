// The rest of the runtime that programs call and the driver serves: libraries of code, updates of graphs, batches of copies,
// and the end of a device's use.

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::in_context;
using oomdiag::report;

OOMDIAG_ENTRY_POINT cudaError_t cudaDeviceReset() {
  return in_context([] { return cuDevicePrimaryCtxReset(oomdiag::current_ordinal()); });
}

OOMDIAG_ENTRY_POINT cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                                        cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}

#if CUDART_VERSION >= 13000  // another form before, which PyTorch does not call
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes,
                                                     size_t count, cudaMemcpyAttributes*, size_t*, size_t,
                                                     cudaStream_t stream) {
  return in_context([&] {
    CUresult error = CUDA_SUCCESS;
    for (size_t i = 0; i < count && !error; ++i) {
      error =
          cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to[i]), reinterpret_cast<CUdeviceptr>(from[i]), bytes[i], stream);
    }
    return error;
  });
}
#endif

OOMDIAG_ENTRY_POINT cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph,
                                                    cudaGraphExecUpdateResultInfo* info) {
  if (info) *info = {};
  return report(cuGraphExecUpdate(executable, graph, nullptr));
}

OOMDIAG_ENTRY_POINT cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*, void**,
                                                    unsigned, cudaLibraryOption*, void**, unsigned) {
  return in_context([&] {
    return cuLibraryLoadData(reinterpret_cast<CUlibrary*>(library), code, nullptr, nullptr, 0, nullptr, nullptr, 0);
  });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t* library, const char* file, cudaJitOption*,
                                                        void**, unsigned, cudaLibraryOption*, void**, unsigned) {
  return in_context([&] {
    return cuLibraryLoadFromFile(reinterpret_cast<CUlibrary*>(library), file, nullptr, nullptr, 0, nullptr, nullptr, 0);
  });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
OOMDIAG_ENTRY_POINT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
  return report(cuLibraryGetKernel(reinterpret_cast<CUkernel*>(kernel), nullptr, name));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaLibraryGetGlobal(void** address, size_t* bytes, cudaLibrary_t, const char* name) {
  return report(cuLibraryGetGlobal(reinterpret_cast<CUdeviceptr*>(address), bytes, nullptr, name));
}

#undef cudaLaunchHostFunc_v2
OOMDIAG_ENTRY_POINT cudaError_t cudaLaunchHostFunc_v2(cudaStream_t stream, cudaHostFn_t function, void* argument,
                                                      unsigned) {
  return cudaLaunchHostFunc(stream, function, argument);
}
