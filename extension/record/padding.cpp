#include "extension/record/padding.h"

#include <algorithm>
#include <cstring>

namespace oomdiag {
namespace {

constexpr int64_t kFewestPositions = 16;
constexpr int64_t kHalf = 500;                      ///< per mille
constexpr int64_t kMaxRows = 256;                   ///< that are looked at, evenly spread
constexpr int64_t kMaxElements = int64_t{1} << 19;  ///< of these; one row may have more

/// A tensor as rows of `positions`, of `inner` elements each.
struct Rows {
  const std::byte* data;
  int64_t rows, positions, inner;

  /// The distance between those that are looked at.
  int64_t stride() const {
    const int64_t most = std::clamp(kMaxElements / (positions * inner), int64_t{1}, kMaxRows);
    return (rows + most - 1) / most;
  }
};

template <typename Number>
Number number_at(const Rows& rows, int64_t element) {
  Number number;
  std::memcpy(&number, rows.data + static_cast<size_t>(element) * sizeof number, sizeof number);
  return number;
}

/// Positions of a row without those at its end, or at its beginning, that are filled with the value.
template <typename Number>
int64_t count_real(const Rows& rows, int64_t row, bool from_end, Number value) {
  const int64_t begin = row * rows.positions * rows.inner, count = rows.positions * rows.inner;
  int64_t filled = 0;
  while (filled < count && number_at<Number>(rows, begin + (from_end ? count - 1 - filled : filled)) == value) ++filled;
  return rows.positions - filled / rows.inner;
}

/// The value is that of the outermost element of the row that has most of it there.
template <typename Number>
std::optional<Padding> find_side(const Rows& rows, bool from_end) {
  const int64_t count = rows.positions * rows.inner, stride = rows.stride();
  const auto outermost = [&](int64_t row) { return number_at<Number>(rows, row * count + (from_end ? count - 1 : 0)); };
  int64_t shortest = rows.positions, row_of_shortest = 0;
  for (int64_t row = 0; row < rows.rows; row += stride) {
    const int64_t real = count_real(rows, row, from_end, outermost(row));
    if (real == 0 || real >= shortest) continue;
    shortest = real;
    row_of_shortest = row;
  }
  const Number value = outermost(row_of_shortest);
  Padding padding;
  int64_t all = 0, looked_at = 0;
  for (int64_t row = 0; row < rows.rows; row += stride) {
    const int64_t real = count_real(rows, row, from_end, value);
    padding.longest = std::max(padding.longest, real);
    all += real;
    ++looked_at;
  }
  padding.per_mille = all * 1000 / (looked_at * rows.positions);
  if (padding.longest == 0 || padding.per_mille >= kHalf) return std::nullopt;
  return padding;
}

std::optional<Padding> find_side(const Rows& rows, bool from_end, size_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return find_side<uint8_t>(rows, from_end);
    case 2:
      return find_side<uint16_t>(rows, from_end);
    case 4:
      return find_side<uint32_t>(rows, from_end);
    case 8:
      return find_side<uint64_t>(rows, from_end);
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<Padding> find_padding(const std::byte* data, size_t element_bytes, std::span<const int64_t> sizes) {
  std::optional<Padding> most;
  int64_t inner = 1;
  for (size_t dimension = sizes.size(); dimension-- > 1;) {
    const int64_t positions = sizes[dimension];
    int64_t outer = 1;
    for (size_t i = 0; i < dimension; ++i) outer *= sizes[i];
    const Rows rows{data, outer, positions, inner};
    inner *= positions;
    const bool is_of_pairs = sizes[dimension - 1] == positions;  // as a mask of attention, half of which is one value
    if (positions < kFewestPositions || outer == 0 || inner == 0 || is_of_pairs) continue;
    for (const bool from_end : {true, false}) {
      const auto found = find_side(rows, from_end, element_bytes);
      if (found && (!most || found->per_mille < most->per_mille)) most = found;
    }
  }
  return most;
}

}  // namespace oomdiag
