#include "profiler/shape_function/polynomial.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "profiler/replay/allocator/settings.h"

// Sizes are products of dimensions and of numbers that the program fixes: a tensor [batch, heads, length, length] of 2 bytes is
// 2 ∙ heads ∙ batch ∙ length². So the search is for few terms and for coefficients that are exact, and not for what comes nearest:
// every subset of up to three terms is solved on as many runs, and must then give all other runs to the byte.

namespace oomdiag {
namespace {

constexpr size_t kMaxTerms = 3;
constexpr int kMaxDegree = 3;  ///< of all dimensions together
constexpr double kFraction = 1 << 20;

using Exponents = std::vector<uint8_t>;

int degree_of(const Exponents& exponents) { return std::accumulate(exponents.begin(), exponents.end(), 0); }

/// All that may occur, by ascending degree.
std::vector<Exponents> list_exponents(size_t dimensions) {
  std::vector<Exponents> all{{}};
  for (size_t d = 0; d < dimensions; ++d) {
    std::vector<Exponents> longer;
    for (const Exponents& shorter : all) {
      for (uint8_t e = 0; e <= 2; ++e) {
        longer.push_back(shorter);
        longer.back().push_back(e);
      }
    }
    all = std::move(longer);
  }
  std::erase_if(all, [](const Exponents& exponents) { return degree_of(exponents) > kMaxDegree; });
  std::ranges::stable_sort(all, {}, degree_of);
  return all;
}

double value_of(const Exponents& exponents, const ShapePoint& point) {
  double value = 1;
  for (size_t d = 0; d < exponents.size(); ++d) {
    for (uint8_t e = 0; e < exponents[d]; ++e) value *= static_cast<double>(point[d]);
  }
  return value;
}

using Row = std::array<long double, kMaxTerms + 1>;  ///< of a system of equations, the right side last

/// Gauss with row pivots; false where the rows do not determine it.
bool solve(std::array<Row, kMaxTerms>& rows, size_t n) {
  for (size_t c = 0; c < n; ++c) {
    const auto pivot = std::max_element(rows.begin() + c, rows.begin() + n,
                                        [&](const Row& a, const Row& b) { return std::fabs(a[c]) < std::fabs(b[c]); });
    if (std::fabs((*pivot)[c]) < 1e-9L) return false;
    std::swap(rows[c], *pivot);
    for (size_t r = 0; r < n; ++r) {
      if (r == c) continue;
      const long double factor = rows[r][c] / rows[c][c];
      for (size_t k = c; k < n; ++k) rows[r][k] -= factor * rows[c][k];
      rows[r][kMaxTerms] -= factor * rows[c][kMaxTerms];
    }
  }
  return true;
}

class Fit {
 public:
  Fit(std::span<const ShapePoint> points, std::span<const int64_t> sizes) : points_(points), sizes_(sizes) {
    const std::vector<ShapePoint> all(points.begin(), points.end());
    for (size_t i = 0; i < all.size(); ++i) {
      if (std::find(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(i), all[i]) ==
          all.begin() + static_cast<std::ptrdiff_t>(i)) {
        distinct_.push_back(i);
      }
    }
  }

  std::optional<Polynomial> find() {
    if (points_.empty()) return std::nullopt;
    exponents_ = list_exponents(points_.front().size());
    const size_t most = std::min(kMaxTerms, distinct_.size() - 1);
    for (size_t terms = 1; terms <= most; ++terms) {
      chosen_.assign(terms, 0);
      if (auto found = choose(0, 0)) return found;
    }
    return std::nullopt;
  }

 private:
  /// Every subset of the exponents that begins with what is chosen already.
  std::optional<Polynomial> choose(size_t place, size_t from) {
    if (place == chosen_.size()) return try_chosen();
    for (size_t e = from; e < exponents_.size(); ++e) {
      chosen_[place] = e;
      if (auto found = choose(place + 1, e + 1)) return found;
    }
    return std::nullopt;
  }

  // Solved on the runs that lie farthest apart: the first, the last, and one between.
  std::optional<Polynomial> try_chosen() const {
    const size_t n = chosen_.size();
    std::array<Row, kMaxTerms> rows{};
    for (size_t r = 0; r < n; ++r) {
      const size_t run = distinct_[n == 1 ? distinct_.size() - 1 : r * (distinct_.size() - 1) / (n - 1)];
      for (size_t c = 0; c < n; ++c) rows[r][c] = value_of(exponents_[chosen_[c]], points_[run]);
      rows[r][kMaxTerms] = static_cast<long double>(sizes_[run]);
    }
    if (!solve(rows, n)) return std::nullopt;
    Polynomial polynomial;
    for (size_t c = 0; c < n; ++c) {
      const auto exact = static_cast<double>(std::roundl(rows[c][kMaxTerms] / rows[c][c] * kFraction) / kFraction);
      if (exact == 0) return std::nullopt;  // fewer terms were tried before
      polynomial.terms.push_back({.coefficient = exact, .exponents = exponents_[chosen_[c]]});
    }
    for (size_t i = 0; i < points_.size(); ++i) {
      if (polynomial.at(points_[i]) != sizes_[i]) return std::nullopt;
    }
    return polynomial;
  }

  std::span<const ShapePoint> points_;
  std::span<const int64_t> sizes_;
  std::vector<size_t> distinct_;  ///< indices of points, each once
  std::vector<Exponents> exponents_;
  std::vector<size_t> chosen_;
};

std::string amount(double bytes) {
  const double size = std::fabs(bytes);
  if (size >= static_cast<double>(kGiB) / 100) return fmt::format("{:.2f} GiB", size / static_cast<double>(kGiB));
  if (size >= static_cast<double>(kMiB) / 100) return fmt::format("{:.2f} MiB", size / static_cast<double>(kMiB));
  if (size >= static_cast<double>(kKiB) / 100) return fmt::format("{:.2f} KiB", size / static_cast<double>(kKiB));
  return fmt::format("{:.2f} B", size);
}

}  // namespace

int64_t Polynomial::at(const ShapePoint& point) const {
  double sum = 0;
  for (const Term& term : terms) sum += term.coefficient * value_of(term.exponents, point);
  return std::llround(sum);
}

Polynomial& Polynomial::operator+=(const Polynomial& other) {
  for (const Term& term : other.terms) {
    const auto same = std::ranges::find(terms, term.exponents, &Term::exponents);
    if (same == terms.end()) {
      terms.push_back(term);
    } else {
      same->coefficient += term.coefficient;
    }
  }
  return *this;
}

std::optional<Polynomial> fit_polynomial(std::span<const ShapePoint> points, std::span<const int64_t> sizes) {
  if (!points.empty() && std::ranges::all_of(sizes, [](int64_t size) { return size == 0; })) return Polynomial{};
  return Fit(points, sizes).find();
}

std::string to_text(const Polynomial& polynomial, std::span<const std::string> names) {
  std::vector<Term> terms = polynomial.terms;
  std::ranges::stable_sort(terms, {}, [](const Term& term) { return degree_of(term.exponents); });
  std::string text;
  for (const Term& term : terms) {
    std::string product;
    for (size_t d = 0; d < term.exponents.size(); ++d) {
      if (term.exponents[d] > 0) product += "·" + names[d] + (term.exponents[d] == 2 ? "²" : "");
    }
    if (std::fabs(term.coefficient) < 1 && product.empty()) continue;
    const char* sign = text.empty() ? (term.coefficient < 0 ? "-" : "") : (term.coefficient < 0 ? " - " : " + ");
    text += sign + amount(term.coefficient) + product;
  }
  return text.empty() ? "0 B" : text;
}

}  // namespace oomdiag
