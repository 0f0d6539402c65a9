#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/explain/causes.h"
#include "profiler/explain/common_referrers.h"
#include "profiler/explain/growth.h"
#include "profiler/field.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// Why so much is held or requested, as a programmer would say it: the second level of a cause.
struct Reason {
  std::string id{};  ///< that of the row that found it
  std::string text{};
  int64_t bytes = 0;
  std::string fix{};
  std::vector<std::string> how{};

  bool operator==(const Reason&) const = default;
};

void visit_fields(auto& visit, Either<Reason> auto& value) {
  visit.object("reason", "What of the program is behind the cause.");
  visit({"id", "a row of profiler/explain/reasons.inc: `recurrent_state`, `key_value_cache`, …"}, value.id);
  visit({"text", "the same in a sentence, with its line"}, value.text);
  visit({"bytes", "that it holds or requests"}, value.bytes);
  visit.or_null({"fix", "the `id` of the fix that cures it"}, value.fix);
  visit({"how", "lines to change, where they are not that fix's own"}, value.how);
}

/// What the rows of kReasons look at, all of one device.
struct ReasonFacts {
  const DeviceHistory& device;
  const std::vector<Growth>& growths;
  std::optional<CauseKind> cause{};
  int64_t batch = 0;  ///< examples of a step; 0: unknown
  CommonReferrers referrers{device.referrers};
};

/// Beside a `first` reason of size: that this step is larger than those before it.
std::optional<Reason> find_second_reason(const ReasonFacts& facts, const Reason& first);

/// The first row of kReasons that holds; nothing where no row does. Of a run that fits only growth has a reason.
std::optional<Reason> find_reason(const ReasonFacts& facts);

}  // namespace oomdiag
