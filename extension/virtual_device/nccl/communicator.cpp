#include "extension/virtual_device/nccl/communicator.h"

#include <utility>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/nccl/connections.h"
#include "extension/virtual_device/nccl/mailbox.h"
#include "extension/virtual_device/nccl/single_rank/job.h"
#include "extension/virtual_device/nccl/single_rank/members.h"

namespace oomdiag {

ncclResult_t make_communicator(ncclComm_t* handle, int count, int rank, const ncclUniqueId& id,
                               const ncclConfig_t* config) {
  *handle = nullptr;
  if (count < 1 || rank < 0 || rank >= count) return ncclInvalidArgument;
  auto comm = std::make_unique<ncclComm>(ncclComm{.count = count, .rank = rank, .id = id});
  cudaFree(nullptr);  // makes the context
  cuCtxGetDevice(&comm->device);
  if (oomdiag_device_use_library()) return ncclUnhandledCudaError;
  if (count > 1) {
    oomdiag_device_note("estimate", "NCCL collectives: what other ranks computed is taken to be what this rank has");
  }
  if (is_single_rank()) {
    oomdiag_device_note("estimate", "the ranks that were not there: they are taken to be like this one");
    Members members = find_members(id, count);
    comm->id = members.id;
    comm->ranks = std::move(members.ranks);
  }
  if (count > 1) comm->mailbox = std::make_unique<Mailbox>(comm->id, count, rank, comm->ranks);
  comm->received.resize(static_cast<size_t>(count));
  comm->connections = std::make_unique<Connections>(count, rank, comm->device, comm->ranks, config);
  *handle = comm.release();
  return ncclSuccess;
}

ncclResult_t join(ncclComm_t comm, Collective collective, int root) {
  const ncclResult_t error = check(comm, root);
  return error ? error : comm->connections->join(collective);
}

ncclResult_t reach(ncclComm_t comm, int rank) {
  const ncclResult_t error = check(comm, rank);
  return error ? error : comm->connections->reach(rank);
}

ncclResult_t reach_all(ncclComm_t comm) {
  if (const ncclResult_t error = check(comm)) return error;
  for (int rank = 0; rank < comm->count; ++rank) {
    if (rank == comm->rank) continue;
    if (const ncclResult_t error = reach(comm, rank)) return error;
  }
  return ncclSuccess;
}

}  // namespace oomdiag
