#pragma once

#include <nccl.h>

// The group of calls that a thread has open (ncclGroupStart). It knows no call: what one leaves for the end is a function.

namespace oomdiag {

/// What calls leave for the end of their group, in the order in which it is done.
enum class GroupTask { messages, splits };

bool is_in_group() noexcept;

/// Has `finish` called once when the outermost group of this thread ends, however often it was asked for.
void at_group_end(GroupTask task, ncclResult_t (*finish)());

/// ncclSuccess.
ncclResult_t open_group();

/// ncclInvalidUsage where none is open. The end of the outermost does every task; of its errors the last one counts.
ncclResult_t close_group();

}  // namespace oomdiag
