#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace oomdiag {

/// The values of the varied dimensions, in the order of their names: {batch, length}.
using ShapePoint = std::vector<int64_t>;

/// coefficient ∙ batch^e0 ∙ length^e1 …, in bytes.
struct Term {
  double coefficient = 0;            ///< a multiple of 2^-20: exact, as sizes are integers of less than 2^53
  std::vector<uint8_t> exponents{};  ///< one for each dimension

  bool operator==(const Term&) const = default;
};

/// Bytes as a polynomial of the dimensions.
struct Polynomial {
  std::vector<Term> terms{};

  /// Rounded to whole bytes.
  int64_t at(const ShapePoint& point) const;
  Polynomial& operator+=(const Polynomial& other);
  bool operator==(const Polynomial&) const = default;
};

/// The polynomial of fewest terms, and of these of lowest degree, that gives every one of `sizes` at its point exactly. At most
/// degree 2 in each dimension and three terms, and always one term fewer than there are points, so that at least one run confirms
/// what the others say. nullopt where there is none.
std::optional<Polynomial> fit_polynomial(std::span<const ShapePoint> points, std::span<const int64_t> sizes);

/// "0.97 GiB + 1.64 GiB·batch + 0.43 MiB·batch·length", largest degree last.
std::string to_text(const Polynomial& polynomial, std::span<const std::string> names);

}  // namespace oomdiag
