#include "profiler/shape_function/single_call.h"

#include <algorithm>
#include <set>

namespace oomdiag {
namespace {

/// Which of `seen` were not made again, if all others were, in order: only such that `may_lack`.
std::optional<std::vector<bool>> find_lacking(const std::vector<int64_t>& seen, const std::vector<bool>& may_lack,
                                              const std::vector<int64_t>& made) {
  std::vector<bool> lacking(seen.size());
  size_t next = 0;
  for (size_t a = 0; a < seen.size(); ++a) {
    if (seen[a] == 0) continue;
    if (next < made.size() && made[next] == seen[a]) {
      ++next;
    } else if (may_lack[a]) {
      lacking[a] = true;
    } else {
      return std::nullopt;
    }
  }
  return next == made.size() ? std::optional(lacking) : std::nullopt;
}

constexpr int64_t kMultiples[] = {8, 16, 32, 64, 128};  ///< to which kernels pad
constexpr size_t kMaxPaddedTerms = 2;                   ///< more would find something in any four runs

ShapePoint round_up(ShapePoint point, const std::vector<int64_t>& multiples) {
  for (size_t d = 0; d < multiples.size(); ++d) point[d] = (point[d] + multiples[d] - 1) / multiples[d] * multiples[d];
  return point;
}

std::optional<CallNumber> fit_padded_number(const std::vector<ShapePoint>& points, const std::vector<int64_t>& values) {
  for (size_t d = 0; d < points.front().size(); ++d) {
    for (const int64_t multiple : kMultiples) {
      std::vector<int64_t> multiples(points.front().size(), 1);
      multiples[d] = multiple;
      std::vector<ShapePoint> padded;
      for (const ShapePoint& point : points) padded.push_back(round_up(point, multiples));
      const auto found = fit_polynomial(padded, values);
      if (found && found->terms.size() <= kMaxPaddedTerms) return CallNumber{*found, multiples};
    }
  }
  return std::nullopt;
}

std::optional<CallNumber> fit_number(const std::vector<ShapePoint>& points, const std::vector<int64_t>& values) {
  const bool is_constant = std::ranges::all_of(values, [&](int64_t value) { return value == values.front(); });
  const std::vector<uint8_t> no_exponents(points.front().size(), 0);
  if (is_constant) return CallNumber{Polynomial{{{static_cast<double>(values.front()), no_exponents}}}};
  if (const auto found = fit_polynomial(points, values)) return CallNumber{*found};
  return fit_padded_number(points, values);
}

}  // namespace

int64_t CallNumber::at(const ShapePoint& point) const { return polynomial.at(round_up(point, multiples)); }

std::string SingleCall::text_at(const ShapePoint& point) const {
  std::vector<int64_t> values;
  for (const CallNumber& number : numbers) values.push_back(number.at(point));
  return write_op_call(form, values);
}

void SingleCall::prove(const std::vector<MadeAlone>& made) {
  state = State::refuted;
  std::optional<std::vector<bool>> common;
  for (size_t run = 0; run < points.size(); ++run) {
    if (!made[run]) return;
    const auto lacking = find_lacking(sizes[run], may_lack, *made[run]);
    if (!lacking || (common && *common != *lacking)) return;
    common = lacking;
  }
  lacks = *common;
  state = State::proved;
}

std::optional<std::vector<int64_t>> SingleCall::assign(const std::vector<int64_t>& made) const {
  std::set<std::vector<bool>> ways;  // which allocations there are, of each run that made as many
  for (const auto& seen : sizes) {
    std::vector<bool> way(seen.size());
    for (size_t a = 0; a < seen.size(); ++a) way[a] = seen[a] > 0 && !lacks[a];
    if (static_cast<size_t>(std::ranges::count(way, true)) == made.size()) ways.insert(way);
  }
  if (ways.size() != 1) return std::nullopt;
  std::vector<int64_t> assigned;
  size_t next = 0;
  for (size_t a = 0; a < lacks.size(); ++a) {
    assigned.push_back(lacks[a] ? -1 : (*ways.begin())[a] ? made[next++] : 0);
  }
  return assigned;
}

std::optional<SingleCall> find_single_call(const MergedSequence& merged, const std::vector<ShapePoint>& points,
                                           uint32_t call, const std::vector<uint32_t>& allocations) {
  SingleCall single{.points = points};
  for (const OpCalls& of_run : merged.op_calls) {
    if (call >= of_run.calls.size()) return std::nullopt;
    const std::string& form = of_run.forms[of_run.calls[call].form];
    if (single.form.empty()) single.form = form;
    if (single.form != form) return std::nullopt;
  }
  for (size_t n = 0; n < merged.op_calls.front().calls[call].numbers.size(); ++n) {
    std::vector<int64_t> values;
    for (const OpCalls& of_run : merged.op_calls) values.push_back(of_run.calls[call].numbers[n]);
    const auto found = fit_number(points, values);
    if (!found) return std::nullopt;
    single.numbers.push_back(*found);
  }
  for (const auto& of_run : merged.sizes) {
    single.sizes.emplace_back();
    for (const uint32_t allocation : allocations) single.sizes.back().push_back(of_run[allocation]);
  }
  return single;
}

}  // namespace oomdiag
