#include "profiler/explain/reasons/reasons.h"

#include <algorithm>
#include <span>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/replay/history.h"

// The second level of a cause: which habit of a program is behind the bytes. Each row of kReasons, of which reasons.inc is the list,
// asks one question of the recorded facts; the first that holds is the reason. A row that only may be true is not said.

namespace oomdiag {
namespace {

/// The device had enough of memory, or had it been shared otherwise: what a program needs at once is not what to look at.
bool had_enough(const ReasonFacts& f) {
  return f.cause && (*f.cause == CauseKind::fragmentation || *f.cause == CauseKind::pending_frees ||
                     *f.cause == CauseKind::non_pytorch || *f.cause == CauseKind::fraction_cap ||
                     *f.cause == CauseKind::imbalance);
}

struct ReasonRow {
  std::string_view id;
  Found (*find)(const ReasonFacts& facts);
  bool of_growth = false;  ///< holds for a run that fits so far, too
  bool of_size = false;    ///< only says that much is needed: no reason where there was enough
  bool of_steps = false;   ///< compares the step with those before it, and so can stand beside another one of size
  bool at_last = false;    ///< is left to say where no other row holds
};

constexpr ReasonRow kReasons[] = {
#define REASON(name, function, ...) ReasonRow{.id = #name, .find = function __VA_OPT__(, ) __VA_ARGS__},
#include "profiler/explain/reasons/reasons.inc"
#undef REASON
};

/// Of a run that ended well the variables are gone: lines for a holder that nobody knows would name none of the program's.
bool has_unknown_holder(const ReasonFacts& facts, const Reason& reason) {
  return !facts.device.failure && reason.kept_by.empty() && reason.fix == "stop_growth" &&
         std::ranges::all_of(facts.growths, [](const Growth& growth) { return growth.referrer.empty(); });
}

void finish(const ReasonRow& row, const ReasonFacts& facts, Reason& reason) {
  reason.id = row.id;
  if (has_unknown_holder(facts, reason)) reason.how.clear();
  reason.text = as_written(reason.text);
  for (std::string& line : reason.how) line = as_written(line);
}

}  // namespace

std::optional<Reason> find_second_reason(const ReasonFacts& facts, const Reason& first) {
  const auto found = std::ranges::find(kReasons, first.id, &ReasonRow::id);
  if (found == std::end(kReasons) || found->of_growth) return {};
  // Beside steps that are compared, what the step itself needs so much for.
  const std::span<const ReasonRow> rows =
      std::span(kReasons).subspan(found->of_steps ? static_cast<size_t>(found - std::begin(kReasons)) : 0);
  for (const ReasonRow& row : rows) {
    const bool counts = found->of_steps ? !row.of_steps && !row.of_growth && !row.at_last : row.of_steps;
    if (Found reason = counts ? row.find(facts) : Found{}) {
      finish(row, facts, *reason);
      return reason;
    }
  }
  return {};
}

std::optional<Reason> find_reason(const ReasonFacts& facts) {
  for (const ReasonRow& row : kReasons) {
    if (!facts.device.failure && !row.of_growth) continue;
    if (row.of_size && had_enough(facts)) continue;
    if (Found reason = row.find(facts)) {
      finish(row, facts, *reason);
      return reason;
    }
  }
  return {};
}

}  // namespace oomdiag
