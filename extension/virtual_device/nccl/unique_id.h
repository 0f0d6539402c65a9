#pragma once

#include <nccl.h>

#include <string>

// A communicator's id (ncclUniqueId): 16 random bytes, then the path of a folder of mode 0700 in which its ranks share files.
// Who makes the id chooses the folder and the first to use it makes it: "ranks" in the run folder, so that nothing is left
// of ranks that were killed, else one with a random name in the temporary folder. Ids that somebody else made name no folder.
// Of a single rank (single_rank/job.h) all files lie in the job's folder.

namespace oomdiag {

ncclUniqueId make_unique_id();

/// The id of a part of a communicator: every rank of the part derives the same one, in the same folder. Two parts share
/// files only if 128 bits of two hashes are the same.
ncclUniqueId derive_id(const ncclUniqueId& parent, int split, int color);

/// A name for what the ranks of a communicator share, in their folder. Empty where that cannot be made or belongs to somebody
/// else.
std::string shared_file(const ncclUniqueId& id, const std::string& what);

/// Removes the folder, if nothing is in it any more.
void leave_shared_folder(const ncclUniqueId& id);

}  // namespace oomdiag
