// Cases about training loops: what a name holds, what is summed, what is run again.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

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

int64_t activations_of(const CaseRun& run) { return category_of(run, Category::activation); }

/// The largest tensor of this module that autograd keeps; nullptr if there is none.
const ReportSavedTensor* saved_of(const CaseRun& run, std::string_view module) {
  for (const ReportSavedTensor& saved : gpu_of(run).saved_tensors) {
    if (saved.module == module) return &saved;
  }
  return nullptr;
}

std::string percent(int64_t part, int64_t whole) {
  return fmt::format("{:.0f} %", whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

}  // namespace

void note_kept_outputs(Note& note, Runs runs) {
  note.compare(runs, {{"peak", peak_of}, {"activations", activations_of}});
  if (const CaseRun* kept = find_run(runs, "kept")) {
    if (const ReportSavedTensor* outputs = saved_of(*kept, "conv2")) {
      note.figure("outputs_bytes", outputs->bytes);
      note.say(
          fmt::format("The outputs of conv2 are {}; {} saves them, so autograd holds them until backward whether "
                      "a name does or not.",
                      with_unit(outputs->bytes), fmt::join(outputs->saved_by, ", ")));
    }
  }
  if (const CaseRun* deleted = find_run(runs, "deleted")) {
    const ScopeCall& call = last_call(*deleted, "delete_outputs");
    const int64_t freed = call.begin_bytes - call.end_bytes;
    note.figure("freed_by_delete_bytes", freed);
    note.figure("returned_by_empty_cache_bytes", call.begin_reserved_bytes - call.end_reserved_bytes);
    const ScopeCall& backward = last_call(*deleted, "backward");
    const int64_t again = backward.end_reserved_bytes - backward.begin_reserved_bytes;
    note.figure("taken_again_by_backward_bytes", again);
    note.say(
        fmt::format("Deleting the name before backward frees {} of {} allocated; empty_cache gives {} of the cache "
                    "back to the driver, and backward takes {} of it again.",
                    with_unit(freed), with_unit(call.begin_bytes),
                    with_unit(call.begin_reserved_bytes - call.end_reserved_bytes), with_unit(again)));
  }
  const CaseRun* kept = find_run(runs, "kept");
  const CaseRun* deleted = find_run(runs, "deleted");
  if (kept != nullptr && deleted != nullptr) {
    const int64_t more = peak_of(*kept) - peak_of(*deleted);
    note.figure("held_by_the_name_bytes", more);
    note.say(
        fmt::format("At the peak, in {}, the name costs {}: autograd lets go of the outputs once it has used them, "
                    "the name holds them through the rest of the step.",
                    name_of(gpu_of(*kept).peak.phase), with_unit(more)));
  }
  if (const CaseRun* without = find_run(runs, "no_grad"); without != nullptr && !raised_of(*without).empty()) {
    note.say(
        fmt::format("Folklore: forward under no_grad peaks at {}, but it saves nothing that training could use: "
                    "backward raises \"{}\".",
                    with_unit(peak_of(*without)), raised_of(*without)));
  }
}

void note_accumulation(Note& note, Runs runs) {
  note.compare(runs, {{"peak", peak_of}, {"activations", activations_of}});
  const CaseRun* accumulated = find_run(runs, "accumulated");
  const CaseRun* whole = find_run(runs, "whole");
  if (accumulated != nullptr && whole != nullptr) {
    note.say(
        fmt::format("Four passes of a quarter of the batch peak at {} of one pass of the whole: activations shrink "
                    "with the pass, parameters, gradients and optimizer state do not.",
                    percent(peak_of(*accumulated), peak_of(*whole))));
  }
  if (const CaseRun* inside = find_run(runs, "zero_grad_inside")) {
    const int64_t steps = std::max<int64_t>(count_calls(*inside, "optimizer"), 1);
    const int64_t passes = count_calls(*inside, "backward") / steps;
    const int64_t clears = count_calls(*inside, "zero_grad") / steps;
    note.figure("zero_grad_inside.clears_per_step", clears);
    if (clears > 1) {
      note.say(
          fmt::format("Defect of zero_grad_inside: zero_grad runs {} times for each optimizer step, so {} of {} "
                      "backward passes are thrown away; nothing accumulates.",
                      clears, passes - 1, passes));
    }
  }
  if (const CaseRun* by_hand = find_run(runs, "one_gradient_scaled")) {
    const int64_t steps = std::max<int64_t>(count_calls(*by_hand, "optimizer"), 1);
    const int64_t scaled = count_calls(*by_hand, "scale_gradient") / steps;
    const int64_t gradients = fact_of(*by_hand, "gradients");
    note.figure("one_gradient_scaled.scaled", scaled);
    note.figure("one_gradient_scaled.gradients", gradients);
    if (scaled < gradients) {
      note.say(
          fmt::format("Defect of one_gradient_scaled: {} of {} gradients is divided by the number of passes ({}); "
                      "the others are that many times too large.",
                      scaled, gradients, count_calls(*by_hand, "backward") / steps));
    }
  }
}

void note_checkpointing(Note& note, Runs runs) {
  note.compare(runs, {{"peak", peak_of}, {"activations", activations_of}});
  const CaseRun* best = nullptr;
  std::vector<std::string> work;
  for (const CaseRun& run : runs) {
    const int64_t steps = std::max<int64_t>(count_calls(run, "optimizer"), 1);
    const int64_t layers = count_calls(run, "layer") / steps;
    note.figure(run.variant + ".layers_run_per_step", layers);
    work.push_back(fmt::format("{} {}", run.variant, layers));
    if (run.report.outcome == "ok" && (best == nullptr || peak_of(run) < peak_of(*best))) best = &run;
  }
  note.say(
      fmt::format("Layers run forward in each step: {}. A segment runs again in backward, so checkpointing pays one "
                  "more forward pass however the net is cut.",
                  fmt::join(work, ", ")));
  const CaseRun* whole = find_run(runs, "whole");
  if (best == nullptr || whole == nullptr || best == whole) return;
  note.figure("best.peak_bytes", peak_of(*best));
  note.say(fmt::format(
      "Pick {}: {} less than the whole net, {}. Fewer segments keep more inside of one, more segments "
      "keep more inputs.",
      best->variant, with_unit(peak_of(*whole) - peak_of(*best)), percent(peak_of(*best), peak_of(*whole))));
}

void note_two_heads(Note& note, Runs runs) {
  note.compare(runs, {{"peak", peak_of},
                      {"forward", [](const CaseRun& run) { return phase_peak_of(run, Phase::forward); }},
                      {"backward", [](const CaseRun& run) { return phase_peak_of(run, Phase::backward); }}});
  const CaseRun& first = runs.front();
  for (const char* part : {"trunk", "second_trunk", "head_a", "head_b"}) {
    const int64_t kept = last_call(first, part).kept_bytes;
    if (kept == 0) continue;
    note.figure(fmt::format("{}.kept_bytes", part), kept);
    note.say(fmt::format("{} keeps {} from forward to backward.", part, with_unit(kept)));
  }
  const CaseRun* summed = find_run(runs, "summed");
  const CaseRun* twice = find_run(runs, "two_backwards");
  if (summed == nullptr || twice == nullptr) return;
  const int64_t difference = peak_of(*twice) - peak_of(*summed);
  note.figure("two_backwards.more_at_peak_bytes", difference);
  note.say(
      fmt::format("Two backward passes instead of one over the summed loss: {} {} at the peak. The first must retain "
                  "the graph, and the trunk is run back twice.",
                  with_unit(std::abs(difference)), difference < 0 ? "less" : "more"));
}

}  // namespace oomdiag
