// Communicators: made, split, asked, ended.

#include <algorithm>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/nccl/communicator.h"
#include "extension/virtual_device/nccl/split.h"
#include "extension/virtual_device/nccl/unique_id.h"

namespace {

ncclResult_t end(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  delete comm;
  return ncclSuccess;
}

template <typename Value>
ncclResult_t give(Value* place, Value value) {
  *place = value;
  return ncclSuccess;
}

}  // namespace

/// What every generated stub of this library does.
extern "C" int oomdiag_unsupported(const char* name) {
  oomdiag_device_note("unsupported", name);
  return ncclInvalidUsage;
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclGetVersion(int* version) { return give(version, NCCL_VERSION_CODE); }

OOMDIAG_ENTRY_POINT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return give(id, oomdiag::make_unique_id()); }

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int count, ncclUniqueId id, int rank,
                                                        ncclConfig_t* config) {
  return oomdiag::make_communicator(comm, count, rank, id, config);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int count, ncclUniqueId id, int rank) {
  return oomdiag::make_communicator(comm, count, rank, id, nullptr);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int count, int rank, int, ncclUniqueId* ids,
                                                          ncclConfig_t* config) {
  return oomdiag::make_communicator(comm, count, rank, ids[0], config);
}

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

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm,
                                               ncclConfig_t* config) {
  return oomdiag::split_communicator(parent, color, key, comm, config);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int excluded_count, ncclComm_t* comm,
                                                ncclConfig_t* config, int) {
  const auto before = std::count_if(excluded, excluded + excluded_count, [&](int rank) { return rank < parent->rank; });
  const ncclUniqueId id = oomdiag::derive_id(parent->id, ++parent->splits, 0);
  return oomdiag::make_communicator(comm, parent->count - excluded_count, parent->rank - static_cast<int>(before), id,
                                    config);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommRevoke(ncclComm_t, int) { return ncclSuccess; }
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return end(comm); }
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommAbort(ncclComm_t comm) { return end(comm); }

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  return give(error, ncclSuccess);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return give(count, comm->count); }
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return give(device, comm->device);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return give(rank, comm->rank); }

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

#if NCCL_VERSION_CODE >= 23000
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) { return give(id, comm->id); }
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  const bool is_bytes = stat == ncclStatGpuMemPersist || stat == ncclStatGpuMemTotal;
  return give(value, is_bytes ? comm->connections->bytes() : 0);
}
#endif
