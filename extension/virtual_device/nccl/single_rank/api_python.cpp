// What the Python side says and asks of a job of which this is a single rank: see extension/python/fixes/oomdiag_ranks.py.

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/nccl/single_rank/job.h"
#include "extension/virtual_device/nccl/single_rank/members.h"
#include "extension/virtual_device/nccl/single_rank/spawn_peer.h"
#include "extension/virtual_device/nccl/transfer.h"

namespace {

thread_local std::unique_ptr<oomdiag::PeerWait> wait_of_python;

}  // namespace

/// `canonical` is the id that every process of the job knows the group by.
OOMDIAG_ENTRY_POINT void oomdiag_nccl_tell_group(const char* id, const char* canonical, int count, const int* ranks) {
  ncclUniqueId known;
  oomdiag::Members members;
  std::memcpy(known.internal, id, sizeof known.internal);
  std::memcpy(members.id.internal, canonical, sizeof members.id.internal);
  members.ranks.assign(ranks, ranks + count);
  oomdiag::register_members(known, std::move(members));
}
OOMDIAG_ENTRY_POINT void oomdiag_nccl_expect_part(int count, const int* ranks) {
  oomdiag::expect_part(std::vector<int>(ranks, ranks + count));
}

OOMDIAG_ENTRY_POINT int oomdiag_nccl_start_peer(int rank) { return oomdiag::spawn_peer(rank) ? 1 : 0; }
OOMDIAG_ENTRY_POINT int oomdiag_nccl_has_ended(int rank) { return oomdiag::has_ended(rank) ? 1 : 0; }

/// Of this thread: whether it is in a call of PyTorch that hands objects over.
OOMDIAG_ENTRY_POINT void oomdiag_nccl_hand_objects_over(int does) { oomdiag::hand_objects_over(does != 0); }

/// Of a wait in Python: begun for `rank`, ended with -1.
OOMDIAG_ENTRY_POINT void oomdiag_nccl_wait_for(int rank) {
  wait_of_python.reset();
  if (rank >= 0) wait_of_python = std::make_unique<oomdiag::PeerWait>(rank);
}
OOMDIAG_ENTRY_POINT int oomdiag_nccl_wait_is_vain() {
  return wait_of_python && wait_of_python->is_deadlocked() ? 1 : 0;
}
