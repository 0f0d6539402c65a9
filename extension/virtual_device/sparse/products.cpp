// Results that are sparse themselves: how many entries they have is computed on the device, and programs read it back to
// allocate the result. A zero, which everything else on the virtual device reads as, would lose that memory, so the
// number is what operands with entries at random places would give, and is noted as an estimate.

#include <cusparse.h>

#include <algorithm>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/entry_point.h"
#include "extension/virtual_device/sparse/answers.h"

using oomdiag::find_matrix;
using oomdiag::SparseMatrix;

namespace {

/// Multiplications of one entry by one other: each entry of `left` pairs with a row of `right`.
double count_products(const SparseMatrix& left, const SparseMatrix& right) {
  return static_cast<double>(left.entries) * static_cast<double>(right.entries) /
         static_cast<double>(std::max<int64_t>(right.rows, 1));
}

/// 1 - e^-x for x >= 0, to the last digit. The mathematical library would be loaded into every process for this alone.
double one_minus_exp(double x) {
  constexpr double kConverges = 1e-3;
  int doublings = 0;
  for (; x > kConverges; x /= 2) ++doublings;
  double result = x * (1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5))));
  for (; doublings > 0; --doublings) result *= 2 - result;
  return result;
}

/// The cells that are hit when `hits` fall at random on a matrix of `rows` × `columns`.
int64_t count_cells_hit(double hits, int64_t rows, int64_t columns) {
  const double cells = static_cast<double>(rows) * static_cast<double>(columns);
  return cells > 0 ? static_cast<int64_t>(cells * one_minus_exp(hits / cells)) : 0;
}

/// A buffer is asked for first, without one, and worked in by a second call.
cusparseStatus_t give_buffer_or_work(const char* name, cusparseHandle_t handle, double requested, size_t* bytes,
                                     const void* buffer) {
  if (buffer) return oomdiag::submit(handle);
  oomdiag_device_note("estimate", name);
  *bytes = static_cast<size_t>(requested);
  return CUSPARSE_STATUS_SUCCESS;
}

}  // namespace

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSpGEMM_workEstimation(
    cusparseHandle_t handle, cusparseOperation_t, cusparseOperation_t, const void*, cusparseConstSpMatDescr_t left,
    cusparseConstSpMatDescr_t, const void*, cusparseSpMatDescr_t, cudaDataType, cusparseSpGEMMAlg_t,
    cusparseSpGEMMDescr_t, size_t* bytes, void* buffer) {
  const auto rows = static_cast<double>(find_matrix(left)->rows);
  return give_buffer_or_work("cusparseSpGEMM_workEstimation", handle, 8 * (rows + 1), bytes, buffer);
}

OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseSpGEMM_compute(
    cusparseHandle_t handle, cusparseOperation_t, cusparseOperation_t, const void*, cusparseConstSpMatDescr_t left,
    cusparseConstSpMatDescr_t right, const void*, cusparseSpMatDescr_t result, cudaDataType, cusparseSpGEMMAlg_t,
    cusparseSpGEMMDescr_t, size_t* bytes, void* buffer) {
  const double products = count_products(*find_matrix(left), *find_matrix(right));
  SparseMatrix& matrix = *find_matrix(result);
  matrix.entries = count_cells_hit(products, matrix.rows, matrix.columns);
  const double bytes_of_products = products * static_cast<double>(matrix.entry_bytes);
  return give_buffer_or_work("cusparseSpGEMM_compute", handle, bytes_of_products, bytes, buffer);
}

/// The entries of a sum: those of both, without those that coincide.
OOMDIAG_ENTRY_POINT cusparseStatus_t cusparseXcsrgeam2Nnz(cusparseHandle_t handle, int rows, int columns,
                                                          const cusparseMatDescr_t, int left, const int*, const int*,
                                                          const cusparseMatDescr_t, int right, const int*, const int*,
                                                          const cusparseMatDescr_t, int*, int* entries, void*) {
  oomdiag_device_note("estimate", "cusparseXcsrgeam2Nnz");
  const double cells = std::max(1.0, static_cast<double>(rows) * static_cast<double>(columns));
  const double both = static_cast<double>(left) * static_cast<double>(right) / cells;
  cusparsePointerMode_t mode = CUSPARSE_POINTER_MODE_HOST;
  cusparseGetPointerMode(handle, &mode);
  if (mode == CUSPARSE_POINTER_MODE_HOST) *entries = static_cast<int>(left + right - std::min(both, INT32_MAX * 1.0));
  return oomdiag::submit(handle);
}
