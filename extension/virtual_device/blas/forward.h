#pragma once

#include "extension/virtual_device/blas/handle.h"
#include "extension/virtual_device/stubs/answers.h"
#include "extension/virtual_device/stubs/handle.h"

namespace oomdiag {

/// A result of one number.
template <typename Number>
cublasStatus_t zero(cublasHandle_t handle, Number* result) {
  return give_zeros(handle, result, sizeof *result);
}

/// A batched factorisation, whose `info`, one number, is the host's.
inline cublasStatus_t factorize(cublasHandle_t handle, int* info) {
  *info = 0;
  return submit(handle);
}

}  // namespace oomdiag
