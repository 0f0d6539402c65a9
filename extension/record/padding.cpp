#include "extension/record/padding.h"

#include <cstring>

namespace oomdiag {
namespace {

constexpr int64_t kFewestPositions = 16;
constexpr int64_t kHalf = 500;  ///< per mille

/// A tensor as rows of `positions`, of so many bytes each.
struct Rows {
  const std::byte* data;
  int64_t rows, positions;
  size_t bytes;

  const std::byte* at(int64_t row, int64_t position) const {
    return data + static_cast<size_t>(row * positions + position) * bytes;
  }
};

/// Whether all elements at a position are like the one at `value`.
bool is_filled_with(const std::byte* position, size_t bytes, const std::byte* value, size_t element_bytes) {
  for (size_t i = 0; i < bytes; i += element_bytes) {
    if (std::memcmp(position + i, value, element_bytes) != 0) return false;
  }
  return true;
}

/// Positions of a row without those at its end, or at its beginning, that are filled with the value.
int64_t count_real(const Rows& rows, int64_t row, bool from_end, const std::byte* value, size_t element_bytes) {
  int64_t left = rows.positions;
  while (left > 0 &&
         is_filled_with(rows.at(row, from_end ? left - 1 : rows.positions - left), rows.bytes, value, element_bytes))
    --left;
  return left;
}

/// The value is that of the outermost element of the row that has most of it there.
std::optional<Padding> find_side(const Rows& rows, bool from_end, size_t element_bytes) {
  const auto outermost = [&](int64_t row) { return from_end ? rows.at(row, rows.positions - 1) : rows.at(row, 0); };
  int64_t shortest = rows.positions, row_of_shortest = 0;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int64_t real = count_real(rows, row, from_end, outermost(row), element_bytes);
    if (real == 0 || real >= shortest) continue;
    shortest = real;
    row_of_shortest = row;
  }
  const std::byte* const value = outermost(row_of_shortest);
  Padding padding;
  int64_t all = 0;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int64_t real = count_real(rows, row, from_end, value, element_bytes);
    padding.longest = real > padding.longest ? real : padding.longest;
    all += real;
  }
  padding.per_mille = all * 1000 / (rows.rows * rows.positions);
  if (padding.longest == 0 || padding.per_mille >= kHalf) return std::nullopt;
  return padding;
}

}  // namespace

std::optional<Padding> find_padding(const std::byte* data, size_t element_bytes, std::span<const int64_t> sizes) {
  std::optional<Padding> most;
  int64_t inner = 1;
  for (size_t dimension = sizes.size(); dimension-- > 1;) {
    const int64_t positions = sizes[dimension];
    int64_t outer = 1;
    for (size_t i = 0; i < dimension; ++i) outer *= sizes[i];
    const Rows rows{data, outer, positions, static_cast<size_t>(inner) * element_bytes};
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
