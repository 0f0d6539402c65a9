#include "extension/virtual_device/nccl/group.h"

#include <array>
#include <cstddef>
#include <utility>

namespace oomdiag {
namespace {

using Finish = ncclResult_t (*)();
constexpr size_t kGroupTasks = 2;

thread_local int depth = 0;
thread_local std::array<Finish, kGroupTasks> at_end{};

}  // namespace

bool is_in_group() noexcept { return depth > 0; }

void at_group_end(GroupTask task, ncclResult_t (*finish)()) { at_end[static_cast<size_t>(task)] = finish; }

ncclResult_t open_group() {
  ++depth;
  return ncclSuccess;
}

ncclResult_t close_group() {
  if (depth == 0) return ncclInvalidUsage;
  if (--depth > 0) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  for (const Finish finish : std::exchange(at_end, {})) {
    if (const ncclResult_t error = finish ? finish() : ncclSuccess) result = error;
  }
  return result;
}

}  // namespace oomdiag
