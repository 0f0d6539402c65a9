#pragma once

#include <cusolverDn.h>

#include "extension/virtual_device/stubs/answers.h"

namespace oomdiag {

/// Work on the stream of a cuSOLVER handle.
cusolverStatus_t submit(cusolverDnHandle_t handle);

/// The work area of the function `name`, in elements of its type; noted as an estimate.
cusolverStatus_t give_estimate(const char* name, Dimensions dimensions, int* elements);

/// The same in bytes.
cusolverStatus_t give_estimate(const char* name, Dimensions dimensions, size_t* bytes);

}  // namespace oomdiag
