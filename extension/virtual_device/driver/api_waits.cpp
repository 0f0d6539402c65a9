// Writes of numbers by a stream, and its waits for them (PyTorch's symmetric memory, NVSHMEM). Who would write a number that
// is waited for does not run, so that a wait is over at once.

#include <cuda.h>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/forward.h"
#include "extension/virtual_device/entry_point.h"

OOMDIAG_ENTRY_POINT CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
                                                unsigned) {
  CUresult error = oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
  for (unsigned i = 0; i < count && !error; ++i) {
    const auto& write_value = operations[i].writeValue;
    if (write_value.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      error = oomdiag::write_value(stream, write_value.address, write_value.value);
    } else if (write_value.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
      error = oomdiag::write_value(stream, write_value.address, write_value.value64);
    }
  }
  return error;
}
