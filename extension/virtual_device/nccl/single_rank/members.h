#pragma once

#include <nccl.h>

#include <vector>

// Who the members of a single rank's communicators are: registered from outside, as there is no other rank to ask.

namespace oomdiag {

struct Members {
  ncclUniqueId id{};         ///< that every process of the job knows the communicator by
  std::vector<int> ranks{};  ///< of its members in the whole job
};

/// Those of the communicator that the program knows by `id`. Where nobody registered so many, it has an id of its own and
/// the first ranks.
Members find_members(const ncclUniqueId& id, int count);
void register_members(const ncclUniqueId& id, Members members);

/// The ranks of the part that the next split makes; empty if none was set.
std::vector<int> take_expected_part();
void expect_part(std::vector<int> ranks);

}  // namespace oomdiag
