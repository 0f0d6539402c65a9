// Cases about memory that grows from step to step, or is said to.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "samples/cases/bytes.h"
#include "samples/cases/case_run.h"
#include "samples/cases/note.h"
#include "samples/cases/notes.h"
#include "samples/cases/scopes.h"

namespace oomdiag {
namespace {

/// Growth of the end of a step over the second half of the steps: the first ones warm up.
int64_t growth_per_step(const CaseRun& run) {
  std::vector<int64_t> ends;
  for (const ScopeCall& call : run.scopes.calls) {
    if (call.name == "step") ends.push_back(call.end_bytes);
  }
  if (ends.size() < 2) return 0;
  const size_t half = (ends.size() - 1) / 2;
  return (ends.back() - ends[half]) / static_cast<int64_t>(ends.size() - 1 - half);
}

/// Who has the most blocks of one kind at the peak: the name, how many and their bytes.
struct Crowd {
  std::string name;
  Category category = Category::unknown;
  int64_t count = 0, bytes = 0;
};

/// Parameters and what belongs to them are as many as they are, in every step.
bool may_be_kept(Category category) {
  using enum Category;
  return category == activation || category == output || category == input || category == temporary ||
         category == unknown;
}

/// Those with about one block for each step, largest first.
std::vector<Crowd> find_crowds(const CaseRun& run) {
  std::map<std::pair<std::string, std::string>, Crowd> crowds;
  for (const ReportOwner& owner : gpu_of(run).allocations) {
    if (!may_be_kept(owner.category)) continue;
    Crowd& crowd = crowds[{owner.name, owner.shape}];
    crowd = {owner.name, owner.category, crowd.count + 1, crowd.bytes + owner.bytes};
  }
  const int64_t steps = std::max<int64_t>(count_calls(run, "step"), 3);
  std::vector<Crowd> found;
  for (const auto& [key, crowd] : crowds) {
    if (crowd.count + 1 >= steps) found.push_back(crowd);
  }
  std::stable_sort(found.begin(), found.end(), [](const Crowd& a, const Crowd& b) { return a.bytes > b.bytes; });
  return found;
}

std::string describe(const Crowd& crowd) {
  return fmt::format("{} ({} blocks, {})", crowd.name.empty() ? name_of(crowd.category) : crowd.name, crowd.count,
                     with_unit(crowd.bytes));
}

}  // namespace

void note_zero_grad(Note& note, Runs runs) {
  note.compare(runs, {{"peak", peak_of},
                      {"forward", [](const CaseRun& run) { return phase_peak_of(run, Phase::forward); }},
                      {"gradients", [](const CaseRun& run) { return category_of(run, Category::gradient); }}});
  if (const CaseRun* never = find_run(runs, "never")) {
    std::vector<int64_t> ends;
    for (const ScopeCall& call : never->scopes.calls) {
      if (call.name == "step") ends.push_back(call.end_bytes);
    }
    if (ends.size() > 1) {
      note.figure("never.after_step_1_bytes", ends.front());
      note.figure("never.after_last_step_bytes", ends.back());
      note.say(
          fmt::format("Folklore: without zero_grad memory {}: {} after step 1, {} after step {}. Gradients are added "
                      "in place; what goes wrong is their value.",
                      ends.back() > ends.front() ? "grows" : "does not grow", with_unit(ends.front()),
                      with_unit(ends.back()), ends.size()));
    }
  }
  const CaseRun* none = find_run(runs, "set_to_none");
  const CaseRun* zero = find_run(runs, "set_to_zero");
  if (none == nullptr || zero == nullptr) return;
  const int64_t forward = phase_peak_of(*zero, Phase::forward) - phase_peak_of(*none, Phase::forward);
  const int64_t peak = peak_of(*zero) - peak_of(*none);
  note.figure("set_to_none.saves_in_forward_bytes", forward);
  note.figure("set_to_none.saves_at_peak_bytes", peak);
  note.say(
      fmt::format("set_to_none changes forward by {} and the peak by {}: gradients are away during forward and back "
                  "when backward ends.",
                  with_unit(forward), with_unit(peak)));
}

void note_growth(Note& note, Runs runs) {
  note.compare(runs, {{"growth per step", growth_per_step}, {"peak", peak_of}});
  for (const CaseRun& run : runs) {
    const std::vector<Crowd> crowds = find_crowds(run);
    if (growth_per_step(run) <= 0 || crowds.empty()) continue;
    note.figure(run.variant + ".owner_bytes", crowds.front().bytes);
    std::vector<std::string> owners;
    for (size_t i = 0; i < std::min<size_t>(crowds.size(), 3); ++i) owners.push_back(describe(crowds[i]));
    note.say(fmt::format("{} grows by {} a step. Who has one more block each step, at the peak: {}.", run.variant,
                         with_unit(growth_per_step(run)), fmt::join(owners, ", ")));
  }
  const CaseRun* losses = find_run(runs, "losses");
  const CaseRun* validation = find_run(runs, "validation_losses");
  const CaseRun* items = find_run(runs, "items");
  if (losses == nullptr || validation == nullptr || items == nullptr) return;
  note.say(
      fmt::format("A kept loss keeps its graph. One that backward ran keeps {} a step, since backward freed what the "
                  "graph had saved; one that it did not run keeps {}; loss.item() keeps {}.",
                  with_unit(growth_per_step(*losses)), with_unit(growth_per_step(*validation)),
                  with_unit(growth_per_step(*items))));
}

}  // namespace oomdiag
