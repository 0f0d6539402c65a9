#include "profiler/shape_function/single_call.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "profiler/shape_function/merge_sequences.h"
#include "profiler/shape_function/op_calls.h"
#include "profiler/shape_function/polynomial.h"

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

std::optional<CallNumber> find_earlier(const std::vector<int64_t>& values, const std::vector<EarlierSize>& earlier) {
  for (const EarlierSize& one : earlier) {
    for (const int64_t bytes : {1, 2, 4, 8}) {
      const auto is_same = [&](int64_t value, int64_t size) { return value * bytes == size; };
      if (std::ranges::equal(values, one.sizes, is_same)) return CallNumber{.rule = one.rule, .element_bytes = bytes};
    }
  }
  return std::nullopt;
}

std::optional<CallNumber> fit_number(const std::vector<ShapePoint>& points, const std::vector<int64_t>& values,
                                     const std::vector<EarlierSize>& earlier) {
  const bool is_constant = std::ranges::all_of(values, [&](int64_t value) { return value == values.front(); });
  const std::vector<uint8_t> no_exponents(points.front().size(), 0);
  if (is_constant) return CallNumber{Polynomial{{{static_cast<double>(values.front()), no_exponents}}}};
  if (const auto found = fit_polynomial(points, values)) return CallNumber{*found};
  if (auto found = find_earlier(values, earlier)) return found;
  return fit_padded_number(points, values);
}

}  // namespace

std::optional<int64_t> CallNumber::at(const ShapePoint& point, const KnownSize& known_size) const {
  if (!rule) return polynomial.at(round_up(point, multiples));
  const std::optional<int64_t> bytes = known_size(*rule);
  return bytes ? std::optional(*bytes / element_bytes) : std::nullopt;
}

std::optional<std::string> SingleCall::text_at(const ShapePoint& point, const KnownSize& known_size) const {
  std::vector<int64_t> values;
  for (const CallNumber& number : numbers) {
    const std::optional<int64_t> value = number.at(point, known_size);
    if (!value) return std::nullopt;
    values.push_back(*value);
  }
  return write_op_call(form, values);
}

void SingleCall::prove(const std::vector<MadeAlone>& made) {
  state = State::refuted;
  std::optional<std::vector<bool>> common;
  for (size_t run = 0; run < points.size(); ++run) {
    if (!made[run]) return;
    const auto lacking = find_lacking(sizes[run], may_lack, requests_of(*made[run]));
    if (!lacking || (common && *common != *lacking)) return;
    common = lacking;
  }
  lacks = *common;
  state = State::proved;
}

std::optional<std::vector<int64_t>> SingleCall::assign(const std::vector<int64_t>& made) const {
  const std::vector<int64_t> requests = requests_of(made);
  std::set<std::vector<bool>> ways;  // which allocations there are, of each run that made as many
  for (const auto& seen : sizes) {
    std::vector<bool> way(seen.size());
    for (size_t a = 0; a < seen.size(); ++a) way[a] = seen[a] > 0 && !lacks[a];
    if (std::ranges::count(way, true) == std::ssize(requests)) ways.insert(way);
  }
  if (ways.size() != 1) return std::nullopt;
  std::vector<int64_t> assigned;
  size_t next = 0;
  for (size_t a = 0; a < lacks.size(); ++a) {
    assigned.push_back(lacks[a] ? -1 : (*ways.begin())[a] ? requests[next++] : 0);
  }
  return assigned;
}

bool SingleCall::has_same_results(const std::vector<int64_t>& made) const {
  const auto given_back = std::ranges::count_if(made, [](int64_t one) { return one < 0; });
  int64_t results = std::ssize(made) - 2 * given_back;
  for (size_t a = 0; a < lacks.size(); ++a) {
    if (!is_result[a] || lacks[a]) continue;
    const bool is_always = std::ranges::all_of(sizes, [&](const auto& seen) { return seen[a] > 0; });
    if (!is_always) return false;
    --results;
  }
  return results == 0;
}

std::vector<int64_t> requests_of(const std::vector<int64_t>& made) {
  std::vector<int64_t> requests;
  std::ranges::copy_if(made, std::back_inserter(requests), [](int64_t one) { return one >= 0; });
  return requests;
}

namespace {

/// Whether two can be one call: no run has different ones.
bool agree(const std::vector<uint32_t>& left, const std::vector<uint32_t>& right) {
  for (size_t run = 0; run < left.size(); ++run) {
    const bool are_known = left[run] != OpCalls::kNone && right[run] != OpCalls::kNone;
    if (are_known && left[run] != right[run]) return false;
  }
  return true;
}

void take_over(CallInRuns& call, const CallInRuns& other) {
  call.allocations.insert(call.allocations.end(), other.allocations.begin(), other.allocations.end());
  for (size_t run = 0; run < call.calls.size(); ++run) {
    if (call.calls[run] == OpCalls::kNone) call.calls[run] = other.calls[run];
  }
}

}  // namespace

// Each allocation says which call it is of in the runs that made it. Two temporaries of one call that no run made together are joined by
// a third allocation, as the call's result, which all runs made.
std::vector<CallInRuns> list_calls(const MergedSequence& merged) {
  std::vector<CallInRuns> all;
  std::map<std::pair<size_t, uint32_t>, size_t> by_number;  // by run and number there: index into `all`
  for (uint32_t a = 0; a < merged.sequence.allocations.size(); ++a) {
    CallInRuns own{.allocations = {a}};
    for (const auto& of_run : merged.calls) own.calls.push_back(of_run[a]);
    if (std::ranges::count(own.calls, OpCalls::kNone) == std::ssize(own.calls)) continue;
    for (size_t run = 0; run < own.calls.size(); ++run) {
      const auto known = by_number.find({run, own.calls[run]});
      if (known == by_number.end() || !agree(own.calls, all[known->second].calls)) continue;
      take_over(own, std::exchange(all[known->second], {.calls = std::vector(own.calls.size(), OpCalls::kNone)}));
    }
    std::ranges::sort(own.allocations);
    for (size_t run = 0; run < own.calls.size(); ++run) {
      if (own.calls[run] != OpCalls::kNone) by_number[{run, own.calls[run]}] = all.size();
    }
    all.push_back(std::move(own));
  }
  std::erase_if(all, [](const CallInRuns& call) { return call.allocations.empty(); });
  std::ranges::sort(all, {}, [](const CallInRuns& call) { return call.allocations.front(); });
  return all;
}

std::optional<SingleCall> find_single_call(const MergedSequence& merged, const std::vector<ShapePoint>& points,
                                           const CallInRuns& call, const std::vector<EarlierSize>& earlier) {
  SingleCall single{.points = points};
  std::vector<ShapePoint> known_points;
  std::vector<const OpCalls::Call*> known;
  for (size_t run = 0; run < points.size(); ++run) {
    if (call.calls[run] == OpCalls::kNone) continue;
    known.push_back(&merged.op_calls[run].calls[call.calls[run]]);
    known_points.push_back(points[run]);
    const std::string& form = merged.op_calls[run].forms[known.back()->form];
    if (single.form.empty()) single.form = form;
    if (single.form != form) return std::nullopt;
  }
  for (size_t n = 0; n < known.front()->numbers.size(); ++n) {
    std::vector<int64_t> values;
    for (const OpCalls::Call* of_run : known) values.push_back(of_run->numbers[n]);
    const auto found = fit_number(known_points, values, earlier);
    if (!found) return std::nullopt;
    single.numbers.push_back(*found);
  }
  for (const uint32_t allocation : call.allocations) {
    single.is_result.push_back(!merged.sequence.allocations[allocation].is_temporary);
  }
  for (const auto& of_run : merged.sizes) {
    single.sizes.emplace_back();
    for (const uint32_t allocation : call.allocations) single.sizes.back().push_back(of_run[allocation]);
  }
  return single;
}

}  // namespace oomdiag
