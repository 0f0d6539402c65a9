// Communicators and errors, beside what is in entry_points.txt.

#include <algorithm>

#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/nccl/communicator.h"
#include "extension/virtual_device/nccl/unique_id.h"

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  int before = 0;
  cudaGetDevice(&before);
  ncclResult_t result = ncclSuccess;
  for (int rank = 0; rank < count && result == ncclSuccess; ++rank) {
    const bool has_device = cudaSetDevice(devices ? devices[rank] : rank) == cudaSuccess;
    result = has_device ? oomdiag::make_communicator(&comms[rank], count, rank, id, nullptr) : ncclUnhandledCudaError;
  }
  cudaSetDevice(before);
  return result;
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int excluded_count, ncclComm_t* comm,
                                                ncclConfig_t* config, int) {
  if (const ncclResult_t error = oomdiag::check(parent)) return error;
  const auto before = std::count_if(excluded, excluded + excluded_count, [&](int rank) { return rank < parent->rank; });
  const ncclUniqueId id = oomdiag::derive_id(parent->id, ++parent->splits, 0);
  return oomdiag::make_communicator(comm, parent->count - excluded_count, parent->rank - static_cast<int>(before), id,
                                    config);
}

OOMDIAG_ENTRY_POINT const char* ncclGetErrorString(ncclResult_t result) {
  switch (static_cast<int>(result)) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage, or not supported by the virtual device";
    default:
      return "unknown result code";
  }
}
OOMDIAG_ENTRY_POINT const char* ncclGetLastError(ncclComm_t) { return ""; }
