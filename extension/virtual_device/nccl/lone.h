#pragma once

#include <nccl.h>

#include <chrono>
#include <string>
#include <vector>

#include "extension/virtual_device/entry_point.h"

// One rank of a job whose others are not there (oomdiag run --world-size 64 --rank 5).
//
// Ranks that are not there are taken to be like this one: what it has, they have. That answers counts, checks of shapes and
// most collectives. What only another rank makes (an object that it broadcasts or sends) cannot be answered so. When the
// host looks at such bytes, the rank that makes them is summoned: the same command is started as that rank, its messages go
// through the mailbox as in a whole job, and it ends when the rank that is diagnosed does. Ranks of a job find each other in
// its folder (OOMDIAG_RANK_JOB), where a file rank-N holds the process id of each that runs.

namespace oomdiag {

/// Whether this process is a rank of such a job.
bool is_lone() noexcept;

/// What every process of the job makes of a communicator's id, and the ranks in the whole job of its members. Ids that
/// nobody told about are their own, and of the first ranks.
struct LoneGroup {
  ncclUniqueId id{};
  std::vector<int> ranks{};
};
LoneGroup find_lone_group(const ncclUniqueId& id, int count);
void tell_lone_group(const ncclUniqueId& id, LoneGroup group);

/// The members of the part that the next split makes; empty if nobody told.
std::vector<int> take_expected_part();

/// Starts that rank if it does not run yet. False if it cannot be had.
bool summon(int rank);

/// Whether a rank that was summoned has ended.
bool has_ended(int rank);

/// This rank waits for another, as the others can see while this lives.
class Wait {
 public:
  explicit Wait(int rank);
  ~Wait();
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

  /// Whether ranks have waited for each other in a circle for five seconds: no message is on its way that long.
  bool is_vain();

 private:
  int rank_;
  std::chrono::steady_clock::time_point last_without_circle_ = std::chrono::steady_clock::now();
};

/// Leaves word that these ranks are the stages of a pipeline: a line in the file "stages", for who runs one rank of each kind.
void tell_stages(const std::vector<int>& ranks);

/// A file of the job.
std::string lone_file(const std::string& name);

}  // namespace oomdiag

/// What the Python side tells: see extension/python/fixes/oomdiag_ranks.py. `canonical` is the id that every process of
/// the job knows the group by.
OOMDIAG_ENTRY_POINT void oomdiag_nccl_tell_group(const char* id, const char* canonical, int count, const int* ranks);
OOMDIAG_ENTRY_POINT void oomdiag_nccl_expect_part(int count, const int* ranks);
OOMDIAG_ENTRY_POINT int oomdiag_nccl_summon(int rank);
OOMDIAG_ENTRY_POINT int oomdiag_nccl_has_ended(int rank);
OOMDIAG_ENTRY_POINT void oomdiag_nccl_hand_objects_over(int does);
/// Of a wait in Python: begun for `rank`, ended with -1. Whether it is vain.
OOMDIAG_ENTRY_POINT void oomdiag_nccl_wait_for(int rank);
OOMDIAG_ENTRY_POINT int oomdiag_nccl_wait_is_vain();
