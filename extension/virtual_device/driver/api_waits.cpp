// Writes of numbers by a stream, and its waits for them (PyTorch's symmetric memory, NVSHMEM). Who would write a number that
// is waited for does not run, so that a wait is over at once.

#include <cuda.h>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"

namespace {

CUresult submit(CUstream stream) { return oomdiag_device_submit(stream, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP); }

template <typename Number>
CUresult write(CUstream stream, CUdeviceptr to, Number value) {
  if (const CUresult error = submit(stream)) return error;
  oomdiag_device_copy(reinterpret_cast<void*>(to), &value, sizeof value);
  return CUDA_SUCCESS;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned) {
  return write(stream, to, value);
}
OOMDIAG_ENTRY_POINT CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned) {
  return write(stream, to, value);
}
OOMDIAG_ENTRY_POINT CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr, cuuint32_t, unsigned) {
  return submit(stream);
}
OOMDIAG_ENTRY_POINT CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr, cuuint64_t, unsigned) {
  return submit(stream);
}

OOMDIAG_ENTRY_POINT CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
                                                unsigned) {
  CUresult error = submit(stream);
  for (unsigned i = 0; i < count && !error; ++i) {
    const auto& write_value = operations[i].writeValue;
    if (write_value.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      error = write(stream, write_value.address, write_value.value);
    } else if (write_value.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
      error = write(stream, write_value.address, write_value.value64);
    }
  }
  return error;
}
