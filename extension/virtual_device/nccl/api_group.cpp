// Groups of calls.

#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/nccl/group.h"

OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupStart() {
  oomdiag::open_group();
  return ncclSuccess;
}
OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupEnd() { return oomdiag::close_group(); }
OOMDIAG_ENTRY_POINT ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  info->estimatedTime = 0;
  return oomdiag::close_group();
}
