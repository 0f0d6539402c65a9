#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/variable_counts.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"

// Rows of kReasons about memory that is there, and that the program does not get: fragmentation, a limit of its own.

namespace oomdiag {

// Small tensors that stay keep large segments from being used again.
Found find_fragmentation(const ReasonFacts& f) {
  if (f.cause != CauseKind::fragmentation) return {};
  std::set<uint64_t> blocking;
  int64_t pieces = 0;
  for (const SegmentLayout& segment : f.device.state.segments) {
    if (segment.used_bytes == 0 || segment.holes == 0) continue;
    pieces += segment.holes;
    blocking.insert(segment.blocked_by.begin(), segment.blocked_by.end());
  }
  std::map<std::string, int64_t> places;
  VariableCounts keepers;
  for (const LiveBlock& block : f.device.state.blocks) {
    if (!blocking.contains(block.address)) continue;
    ++places[short_place(block.made)];
    const Referrer* const referrer = f.referrers.find(block);
    if (referrer != nullptr && is_data(block)) keepers.add(referrer->variable, 1);
  }
  const auto most = std::ranges::max_element(places, {}, [](const auto& entry) { return entry.second; });
  const std::string made = most == places.end() || most->first.empty() ? "" : ", as those made at " + most->first;
  const bool one_keeps_most = keepers.count_of_most() * 2 > static_cast<int64_t>(blocking.size()) && !f.growths.empty();
  if (one_keeps_most && is_container(keepers.most())) {
    return Reason{.text = fmt::format("what is free lies in {} pieces between tensors that {} keeps{}", pieces,
                                      keepers.most(), made),
                  .bytes = sum_grown(f.growths),
                  .fix = "results_to_host",
                  .how = {line_for_kept(keepers.most(), false)}};
  }
  return Reason{.text = fmt::format("what is free lies in {} pieces between tensors that stay{}", pieces, made),
                .fix = "segments_that_grow"};
}

Found find_own_limit(const ReasonFacts& facts) {
  if (!facts.cause || *facts.cause != CauseKind::fraction_cap) return {};
  return Reason{.text = "a limit that the program or its allocator settings chose ended it, and not the GPU",
                .bytes = requested_bytes(facts),
                .fix = "larger_fraction"};
}

}  // namespace oomdiag
