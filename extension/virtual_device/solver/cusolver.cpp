// cuSOLVER. Nothing is solved: results stay on the device, and `info` reads as 0, success. Nearly all of it is generated
// from the library's own headers (stubs/answer.py), the handle by entry_points.txt; here are the sizes of the work areas.
//
// cuSOLVER does not document those, so each is an estimate: what LAPACK documents as the workspace of the routine of the
// same name, with blocks of 64 columns, for each matrix of a batch.

#include <cusolverDn.h>

#include <algorithm>
#include <string_view>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/solver/forward.h"
#include "extension/virtual_device/stubs/answers.h"
#include "extension/virtual_device/stubs/handle.h"

namespace {

constexpr int64_t kBlock = 64;

/// LAPACK's workspace, in elements, for one matrix of `rows` × `columns`.
int64_t lapack_elements(std::string_view routine, int64_t rows, int64_t columns) {
  const auto is_one_of = [&](auto... names) { return ((routine.find(names) != std::string_view::npos) || ...); };
  const int64_t larger = std::max(rows, columns);
  const int64_t smaller = std::min(rows, columns);
  if (is_one_of("syev", "heev", "sygv", "hegv")) return 1 + 6 * larger + 2 * larger * larger;
  if (is_one_of("gesvdj", "gesvda", "gesvdr", "gesvdp")) return rows * columns + 2 * smaller * smaller + larger;
  if (is_one_of("gesvd")) return std::max(3 * smaller + larger, 5 * smaller) + kBlock * (rows + columns);
  if (is_one_of("geev")) return larger * larger + (4 + kBlock) * larger;
  if (is_one_of("gesv", "gels")) return rows * columns + kBlock * larger;
  return kBlock * larger;
}

int64_t estimate_elements(std::string_view routine, oomdiag::Dimensions dimensions) {
  const int64_t rows = oomdiag::find_dimension(dimensions, "m", oomdiag::find_dimension(dimensions, "n", 1));
  const int64_t columns = oomdiag::find_dimension(dimensions, "n", rows);
  const int64_t batch = oomdiag::find_dimension(dimensions, "batchSize", 1);
  return std::max<int64_t>(batch, 1) * lapack_elements(routine, rows, columns);
}

}  // namespace

namespace oomdiag {

cusolverStatus_t submit(cusolverDnHandle_t handle) {
  return submit_kernel<SolverHandle>(handle, CUSOLVER_STATUS_NOT_INITIALIZED, CUSOLVER_STATUS_EXECUTION_FAILED);
}

cusolverStatus_t give_estimate(const char* name, Dimensions dimensions, int* elements) {
  oomdiag_device_note("estimate", name);
  *elements = static_cast<int>(std::min<int64_t>(estimate_elements(name, dimensions), INT32_MAX));
  return CUSOLVER_STATUS_SUCCESS;
}

cusolverStatus_t give_estimate(const char* name, Dimensions dimensions, size_t* bytes) {
  oomdiag_device_note("estimate", name);
  const auto type = static_cast<cudaDataType>(find_dimension(dimensions, "computeType", CUDA_R_64F));
  *bytes = static_cast<size_t>(estimate_elements(name, dimensions) * bytes_of(type));
  return CUSOLVER_STATUS_SUCCESS;
}

}  // namespace oomdiag
