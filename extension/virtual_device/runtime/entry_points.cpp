// The rest of the runtime that programs call and the driver serves: libraries of code, updates of graphs, batches of copies,
// and the end of a device's use.

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/runtime/status.h"

using oomdiag::in_context;
using oomdiag::report;

OOMDIAG_ENTRY_POINT cudaError_t cudaDeviceReset() {
  const CUresult error = oomdiag::initialize();
  return report(error ? error : cuDevicePrimaryCtxReset(oomdiag::current_ordinal()));
}

OOMDIAG_ENTRY_POINT cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                                        cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}

namespace {

CUresult copy_batch(void* const* to, const void* const* from, const size_t* bytes, size_t count, cudaStream_t stream) {
  CUresult error = CUDA_SUCCESS;
  for (size_t i = 0; i < count && !error; ++i) {
    error =
        cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to[i]), reinterpret_cast<CUdeviceptr>(from[i]), bytes[i], stream);
  }
  return error;
}

}  // namespace

#if CUDART_VERSION >= 13000
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes,
                                                     size_t count, cudaMemcpyAttributes*, size_t*, size_t,
                                                     cudaStream_t stream) {
  return in_context([&] { return copy_batch(to, from, bytes, count, stream); });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpyWithAttributesAsync(void* to, const void* from, size_t bytes,
                                                              cudaMemcpyAttributes*, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

// The driver's enumerations have the same numbers, and its location the same two fields.

OOMDIAG_ENTRY_POINT cudaError_t cudaMemGetDefaultMemPool(cudaMemPool_t* pool, cudaMemLocation* location,
                                                         cudaMemAllocationType type) {
  return in_context([&] {
    return cuMemGetDefaultMemPool(pool, reinterpret_cast<CUmemLocation*>(location),
                                  static_cast<CUmemAllocationType>(type));
  });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemGetMemPool(cudaMemPool_t* pool, cudaMemLocation* location,
                                                  cudaMemAllocationType type) {
  return in_context([&] {
    return cuMemGetMemPool(pool, reinterpret_cast<CUmemLocation*>(location), static_cast<CUmemAllocationType>(type));
  });
}
OOMDIAG_ENTRY_POINT cudaError_t cudaMemSetMemPool(cudaMemLocation* location, cudaMemAllocationType type,
                                                  cudaMemPool_t pool) {
  return in_context([&] {
    return cuMemSetMemPool(reinterpret_cast<CUmemLocation*>(location), static_cast<CUmemAllocationType>(type), pool);
  });
}
#else
OOMDIAG_ENTRY_POINT cudaError_t cudaMemcpyBatchAsync(void** to, void** from, size_t* bytes, size_t count,
                                                     cudaMemcpyAttributes*, size_t*, size_t, size_t* failed,
                                                     cudaStream_t stream) {
  if (failed) *failed = SIZE_MAX;  // none of them: "not specific to any one copy" (cuda_runtime_api.h)
  return in_context([&] { return copy_batch(to, from, bytes, count, stream); });
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
OOMDIAG_ENTRY_POINT cudaError_t cudaLibraryUnload(cudaLibrary_t library) { return report(cuLibraryUnload(library)); }
OOMDIAG_ENTRY_POINT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char* name) {
  return report(cuLibraryGetKernel(reinterpret_cast<CUkernel*>(kernel), library, name));
}
OOMDIAG_ENTRY_POINT cudaError_t cudaLibraryGetGlobal(void** address, size_t* bytes, cudaLibrary_t library,
                                                     const char* name) {
  return report(cuLibraryGetGlobal(reinterpret_cast<CUdeviceptr*>(address), bytes, library, name));
}

OOMDIAG_ENTRY_POINT cudaError_t cudaLibraryGetManaged(void** address, size_t* bytes, cudaLibrary_t library,
                                                      const char* name) {
  return cudaLibraryGetGlobal(address, bytes, library, name);
}

#undef cudaLaunchHostFunc_v2
OOMDIAG_ENTRY_POINT cudaError_t cudaLaunchHostFunc_v2(cudaStream_t stream, cudaHostFn_t function, void* argument,
                                                      unsigned) {
  return cudaLaunchHostFunc(stream, function, argument);
}
