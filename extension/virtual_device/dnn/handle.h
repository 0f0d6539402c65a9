#pragma once

#include <cudnn.h>

#include "extension/virtual_device/dnn/amount.h"

namespace oomdiag {

/// What this library gives for a cudnnHandle_t. The real cuDNN never sees one.
struct DnnHandle {
  cudaStream_t stream = nullptr;
};

inline DnnHandle* find_handle(cudnnHandle_t handle) { return reinterpret_cast<DnnHandle*>(handle); }

/// Work on the handle's stream: a short kernel, or one whose amount is known.
cudnnStatus_t submit_work(cudnnHandle_t handle, const Amount& amount = {});

/// Notes that the answer of `name` is an estimate, and gives it.
cudnnStatus_t give_estimate(const char* name, size_t* place, size_t bytes);

}  // namespace oomdiag
