// Memory that programs get from NCCL or make known to it, and reduction operators of their own.

#include "extension/virtual_device/entry_point.h"

OOMDIAG_ENTRY_POINT ncclResult_t ncclMemAlloc(void** block, size_t bytes) {
  return cudaMalloc(block, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclMemFree(void* block) {
  return cudaFree(block) ? ncclUnhandledCudaError : ncclSuccess;
}

// A registration is its buffer.
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommRegister(const ncclComm_t, void* buffer, size_t, void** handle) {
  *handle = buffer;
  return ncclSuccess;
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommWindowRegister(ncclComm_t, void* buffer, size_t, ncclWindow_t* window, int) {
  *window = static_cast<ncclWindow_t>(buffer);
  return ncclSuccess;
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }

OOMDIAG_ENTRY_POINT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void*, ncclDataType_t,
                                                          ncclScalarResidence_t, ncclComm_t) {
  *operation = static_cast<ncclRedOp_t>(ncclNumOps);  // the first of the user's own (nccl.h)
  return ncclSuccess;
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

#if NCCL_VERSION_CODE >= 23000
OOMDIAG_ENTRY_POINT ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t window, void** buffer) {
  *buffer = window;
  return ncclSuccess;
}
#endif
