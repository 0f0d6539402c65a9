// Communicators: made, asked, split, ended.

#include "extension/virtual_device/nccl/communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/nccl/lone.h"

namespace {

ncclResult_t make(ncclComm_t* handle, int count, int rank, const ncclUniqueId& id, const ncclConfig_t* config) {
  *handle = nullptr;
  if (count < 1 || rank < 0 || rank >= count) return ncclInvalidArgument;
  auto comm = std::make_unique<ncclComm>(ncclComm{.count = count, .rank = rank, .id = id});
  cudaFree(nullptr);  // makes the context
  cuCtxGetDevice(&comm->device);
  if (oomdiag_device_use_library()) return ncclUnhandledCudaError;
  if (count > 1) {
    oomdiag_device_note("estimate", "NCCL collectives: what other ranks computed is taken to be what this rank has");
  }
  if (oomdiag::is_lone()) {
    oomdiag_device_note("estimate", "the ranks that were not there: they are taken to be like this one");
    oomdiag::LoneGroup group = oomdiag::find_lone_group(id, count);
    comm->id = group.id;
    comm->ranks = std::move(group.ranks);
  }
  if (count > 1) comm->mailbox = std::make_unique<oomdiag::Mailbox>(comm->id, count, rank, comm->ranks);
  comm->received.resize(static_cast<size_t>(count));
  comm->connections = std::make_unique<oomdiag::Connections>(count, rank, comm->device, comm->ranks, config);
  *handle = comm.release();
  return ncclSuccess;
}

ncclResult_t end(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  delete comm;
  return ncclSuccess;
}

/// Adds to the number that lies at `place` of the id.
void add_to(ncclUniqueId& id, size_t place, uint32_t more) {
  uint32_t number = 0;
  std::memcpy(&number, id.internal + place, sizeof number);
  number += more;
  std::memcpy(id.internal + place, &number, sizeof number);
}

/// The id of a part: every rank of it derives the same one. PyTorch's colors are hashes of 31 bits.
ncclUniqueId derive_id(const ncclComm& parent, int color) {
  ncclUniqueId id = parent.id;
  add_to(id, sizeof id - sizeof(uint32_t), static_cast<uint32_t>(parent.splits));
  add_to(id, sizeof id - 2 * sizeof(uint32_t), static_cast<uint32_t>(color) + 1);
  return id;
}

/// The part that a lone rank is told it belongs to. Others are not asked.
ncclResult_t split_alone(const ncclComm& parent, int color, ncclComm_t* comm, const ncclConfig_t* config) {
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<int> part = oomdiag::take_expected_part();
  if (part.empty()) part = parent.ranks;
  const int own = parent.ranks[static_cast<size_t>(parent.rank)];
  const auto place = std::find(part.begin(), part.end(), own);
  if (place == part.end()) return ncclInvalidUsage;
  const int rank = static_cast<int>(place - part.begin()), count = static_cast<int>(part.size());
  const ncclUniqueId id = derive_id(parent, color);
  oomdiag::tell_lone_group(id, {.id = id, .ranks = std::move(part)});
  return make(comm, count, rank, id, config);
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

OOMDIAG_ENTRY_POINT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  for (char& byte : id->internal) byte = static_cast<char>(random());
  return ncclSuccess;
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int count, ncclUniqueId id, int rank,
                                                        ncclConfig_t* config) {
  return make(comm, count, rank, id, config);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int count, ncclUniqueId id, int rank) {
  return make(comm, count, rank, id, nullptr);
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int count, int rank, int, ncclUniqueId* ids,
                                                          ncclConfig_t* config) {
  return make(comm, count, rank, ids[0], config);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  int before = 0;
  cudaGetDevice(&before);
  ncclResult_t result = ncclSuccess;
  for (int rank = 0; rank < count && result == ncclSuccess; ++rank) {
    const bool has_device = cudaSetDevice(devices ? devices[rank] : rank) == cudaSuccess;
    result = has_device ? make(&comms[rank], count, rank, id, nullptr) : ncclUnhandledCudaError;
  }
  cudaSetDevice(before);
  return result;
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm,
                                               ncclConfig_t* config) {
  *comm = nullptr;
  ++parent->splits;
  if (oomdiag::is_lone()) return split_alone(*parent, color, comm, config);
  oomdiag::SplitAnswer answer{.count = parent->count, .rank = parent->rank};
  if (oomdiag::is_in_group() || !oomdiag::agree_on_split(*parent, color, key, answer)) {
    oomdiag_device_note("estimate", "ncclCommSplit: the part is taken to be as large as the whole");
  }
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  return make(comm, answer.count, answer.rank, derive_id(*parent, color), config);
}

OOMDIAG_ENTRY_POINT ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int excluded_count, ncclComm_t* comm,
                                                ncclConfig_t* config, int) {
  ++parent->splits;
  const auto before = std::count_if(excluded, excluded + excluded_count, [&](int rank) { return rank < parent->rank; });
  return make(comm, parent->count - excluded_count, parent->rank - static_cast<int>(before), derive_id(*parent, 0),
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
