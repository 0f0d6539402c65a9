#include "profiler/explain/reasons/growth_evidence.h"

#include <algorithm>

#include "profiler/explain/facts/growth.h"
#include "profiler/explain/reasons/reasons.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"

namespace oomdiag {

bool keeps_nodes(const ReasonFacts& facts) {
  return std::ranges::any_of(facts.device.referrers,
                             [](const Referrer& one) { return one.earlier_nodes() >= kSeveralPasses; });
}

bool keeps_outputs(const ReasonFacts& facts, const Growth& growth) {
  if (growth.kind != GrowthKind::retained_graph) return false;
  if (growth.is_referred()) return true;
  if (keeps_nodes(facts)) return false;
  int64_t released = 0, saved = 0, all = 0;
  for (const StepAllocation& block : facts.device.step_allocations.blocks) {
    if (block.is_of_step() || !block.in_graph || block.phase != Phase::forward) continue;
    all += block.bytes;
    saved += block.category == Category::activation ? block.bytes : 0;
    released += block.category == Category::output && block.ever_saved ? block.bytes : 0;
  }
  return released > 0 && released * 10 >= all * 3 && saved * 10 <= released;
}

bool consists_of_tensors(const ReasonFacts& facts, const Growth& growth) {
  return growth.kind == GrowthKind::kept_tensors || keeps_outputs(facts, growth);
}

std::string growing_text(const Growth& growth) { return with_unit(growth.bytes_per_step) + " per step"; }

}  // namespace oomdiag
