#include "cli/experiments/fit_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/experiments/border_search.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fit_values.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/sizes.h"
#include "profiler/counted.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/text/table.h"

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

/// The last one with these values that was on such a GPU, which went the furthest; of those that had more memory one that
/// shows that they fit.
const FitRun* find_run(const std::vector<FitRun>& runs, const Values& values, int64_t memory_bytes = 0) {
  const auto measured = std::find_if(runs.rbegin(), runs.rend(), [&](const FitRun& run) {
    return run.values == values && !run.learns && run.memory_bytes == memory_bytes;
  });
  if (measured != runs.rend()) return &*measured;
  const auto learned = std::find_if(runs.rbegin(), runs.rend(), [&](const FitRun& run) {
    return run.values == values && run.learns && memory_bytes == 0 && fits(run) == Fits::yes;
  });
  return learned == runs.rend() ? nullptr : &*learned;
}

Values values_at(const std::string& variable, const LargestValue& largest) {
  Values values = largest.others;
  values[variable] = largest.value.value_or(0);
  return values;
}

/// Of a run that passed.
std::string reach_of(const FitRun& run) {
  if (run.is_whole()) return "a whole run";
  return run.experiment.stopped_at_step > 1 ? fmt::format("as far as step {}", run.experiment.stopped_at_step)
                                            : "until its peak rose no more";
}

/// "it grows by 2 MiB per step; to its end it ": what grows has a border only for so many steps. Empty where nothing does.
std::string growth_text(const FitRun* run) {
  if (run == nullptr || run->experiment.growth_bytes <= 0) return {};
  return fmt::format("it grows by {} per step; {} it ", with_unit(run->experiment.growth_bytes),
                     run->is_whole() ? "to its end" : reach_of(*run));
}

std::string about_value(const Variable& variable, const LargestValue& largest, const std::vector<FitRun>& runs) {
  Values values = largest.others;
  if (!largest.value) {
    values[variable.name] = variable.value(0);
    const FitRun* const least = find_run(runs, values);
    return fmt::format("oomdiag: {} already runs out of memory in {}\n", describe(values),
                       least == nullptr ? "" : least->experiment.place);
  }
  values[variable.name] = *largest.value;
  const FitRun* const run = find_run(runs, values);
  const std::string grows = growth_text(run);
  std::string text =
      fmt::format("oomdiag: {} up to {}\n\n", grows.empty() ? "fits" : grows + "passes", describe(values));
  if (run != nullptr) {
    text += fmt::format("  its peak is {} GiB allocated, {} GiB reserved\n", to_gib(run->experiment.allocated_bytes),
                        to_gib(run->experiment.reserved_bytes));
  }
  text += reach_text(runs, values, 0);
  if (!largest.formula.empty()) {
    const bool is_higher_later =
        run != nullptr && largest.computed_bytes > 0 &&
        run->experiment.allocated_bytes > largest.computed_bytes + largest.computed_bytes / 100;
    text += fmt::format("  its tensors at the peak{} take {}\n", is_higher_later ? " of its first steps" : "",
                        largest.formula);
  }
  if (!largest.doubt.empty()) text += fmt::format("  what is computed near it is an estimate: {}\n", largest.doubt);
  if (largest.is_last_of_range) text += "  it is the largest that was asked for\n";
  for (const int64_t above : largest.failed_above) {
    values[variable.name] = above;
    const FitRun* const failed = find_run(runs, values);
    if (failed != nullptr && above == largest.failed_above.front()) {
      text += fmt::format("  {} runs out of memory in {}", above, failed->experiment.place);
    }
  }
  if (largest.failed_above.size() > 1) {
    text += fmt::format("; so do {}", fmt::join(largest.failed_above.begin() + 1, largest.failed_above.end(), ", "));
  }
  if (!largest.failed_above.empty()) text += "\n";
  if (largest.may_pass_above) {
    text += fmt::format(
        "  libraries chose other algorithms as it grew: a much larger one may fit again, --runs {} looks there\n",
        2 * runs.size() + BorderSearch::kNeighbours);
  }
  std::vector<int64_t> below;
  for (const FitRun& one : runs) {
    values[variable.name] = one.values.at(variable.name);
    if (!one.experiment.passed() && one.values == values &&
        values[variable.name] < *largest.value) {  // those that learn pass
      below.push_back(values[variable.name]);
    }
  }
  std::sort(below.begin(), below.end());
  if (!below.empty())
    text += fmt::format("  smaller ones ran out as well, as fragmentation decides there: {}\n", fmt::join(below, ", "));
  return text;
}

/// What was computed of other values.
std::string computed_text(const FitOfGpu& found) {
  if (!found.unknown.empty()) return fmt::format("  nothing can be computed: {}\n", found.unknown);
  std::string text;
  for (const auto& [values, estimate] : found.computed) {
    text += fmt::format(
        "  computed  {}  {} GiB allocated, {} GiB reserved, {}{}\n", padded(describe(values), 28),
        to_gib(estimate.peak_allocated_bytes), to_gib(estimate.peak_reserved_bytes),
        estimate.fits ? "fits" : fmt::format("out of memory in step {} ({})", estimate.step, estimate.place),
        estimate.is_exact()           ? std::string("; exact")
        : estimate.allocated_is_exact ? "; allocated is exact, reserved an estimate: " + estimate.doubt
                                      : "; an estimate: " + estimate.doubt);
  }
  return text;
}

constexpr const char* kNotSeen = "what comes later, as a validation, was not seen: --steps all";

std::string row_of_table(const Variable& variable, const FitOfGpu& one, const LargestValue& largest) {
  const FitRun* const run = largest.value ? find_run(one.runs, values_at(variable.name, largest)) : nullptr;
  std::string text = fmt::format("  {} {} {:>8}", padded(one.gpu, 18),
                                 padded(describe(largest.others), largest.others.empty() ? 0 : 20),
                                 largest.value ? std::to_string(*largest.value) : "none");
  if (!largest.value) return text + "\n";
  std::vector<std::string> notes;
  notes.push_back(run == nullptr ? "computed" : reach_of(*run));
  if (largest.is_last_of_range) notes.emplace_back("the end of the range");
  if (run != nullptr && run->experiment.growth_bytes > 0)
    notes.push_back(fmt::format("grows by {} per step", with_unit(run->experiment.growth_bytes)));
  return text + fmt::format("  {:>13}   {}\n",
                            to_gib(run != nullptr ? run->experiment.allocated_bytes : largest.computed_bytes),
                            fmt::join(notes, "; "));
}

std::string table(const Variable& variable, const std::vector<FitOfGpu>& found) {
  const bool has_others = !found.front().largest.front().others.empty();
  std::string text =
      fmt::format("oomdiag: the largest {} that fits\n\n  {} {} {:>8}  GiB allocated\n", variable.name,
                  padded("GPU", 18), padded(has_others ? "with" : "", has_others ? 20 : 0), variable.name);
  std::vector<FitRun> runs;
  for (const FitOfGpu& one : found) {
    runs.insert(runs.end(), one.runs.begin(), one.runs.end());
    for (const LargestValue& largest : one.largest) text += row_of_table(variable, one, largest);
  }
  const bool is_cut = std::ranges::any_of(runs, [](const FitRun& run) { return !run.is_whole(); });
  return text + (is_cut ? fmt::format("\n  {}", kNotSeen) : "") + fmt::format("\n  {}\n", count_runs(runs));
}

/// On a real GPU with times: on a virtual one work takes none.
Json tried(const std::vector<FitRun>& runs, bool is_real = false, bool learns = false) {
  Json list = Json::array();
  for (const FitRun& run : runs) {
    if (run.learns != learns) continue;
    Json one = Json::object();
    for (const auto& [name, value] : run.values) one[name] = value;
    if (run.memory_bytes > 0) one["memory_bytes"] = run.memory_bytes;
    one["fits"] = fits(run) == Fits::unknown ? Json(nullptr) : Json(fits(run) == Fits::yes);
    one["peak_allocated_bytes"] = run.experiment.allocated_bytes;
    one["peak_reserved_bytes"] = run.experiment.reserved_bytes;
    one["stopped_at_step"] = run.experiment.stopped_at_step;
    if (is_real) one["seconds"] = run.experiment.seconds;
    list.push_back(std::move(one));
  }
  return list;
}

Json computed_json(const FitOfGpu& found) {
  Json list = Json::array();
  for (const auto& [values, estimate] : found.computed) {
    Json one = Json::object();
    for (const auto& [name, value] : values) one[name] = value;
    one["fits"] = estimate.fits;
    one["peak_allocated_bytes"] = estimate.peak_allocated_bytes;
    one["peak_reserved_bytes"] = estimate.peak_reserved_bytes;
    one["allocated_exact"] = estimate.allocated_is_exact;
    one["reserved_exact"] = estimate.reserved_is_exact;
    one["doubt"] = estimate.doubt;
    list.push_back(std::move(one));
  }
  return list;
}

Json values_of(const std::string& variable, const LargestValue* largest) {
  if (largest == nullptr || !largest->value) return nullptr;
  Json json = {{variable, *largest->value}};
  for (const auto& [name, value] : largest->others) json[name] = value;
  return json;
}

std::string calls_text(std::size_t calls_alone) {
  return calls_alone == 0 ? std::string()
                          : fmt::format("\n  {} made alone, for sizes that no polynomial gives",
                                        counted(calls_alone, "operator call"));
}

}  // namespace

std::string count_runs(const std::vector<FitRun>& runs) {
  const auto learn = std::ranges::count_if(runs, [](const FitRun& run) { return run.learns; });
  if (learn == 0) return counted(runs.size(), "run") + ", all measured";
  return fmt::format("{}: {} with more memory to learn every size from, {} on the GPU", counted(runs.size(), "run"),
                     learn, runs.size() - static_cast<std::size_t>(learn));
}

std::string reach_text(const std::vector<FitRun>& runs, const Values& values, int64_t memory_bytes) {
  const FitRun* const run = find_run(runs, values, memory_bytes);
  if (run == nullptr || !run->experiment.passed()) return {};
  if (run->is_whole()) return fmt::format("  measured: {}\n", reach_of(*run));
  const std::string limit = run->goes_on ? fmt::format(" in the {} s that it was given", kLongestRun.count()) : "";
  return fmt::format("  it was run {}{}; {}\n", reach_of(*run), limit, kNotSeen);
}

std::string values_text(const Variable& variable, const std::vector<FitOfGpu>& found) {
  if (found.size() > 1 || found.front().largest.size() > 1) return table(variable, found);
  const FitOfGpu& one = found.front();
  if (one.largest.empty()) {
    return fmt::format("oomdiag: computed, without a search for the border\n\n{}  {}\n", computed_text(one),
                       count_runs(one.runs));
  }
  return about_value(variable, one.largest.front(), one.runs) + computed_text(one) +
         fmt::format("  {}{}\n", count_runs(one.runs), calls_text(one.calls_alone));
}

std::string values_json(const std::string& variable, const std::vector<FitOfGpu>& found) {
  Json json = {{"schema", "oomdiag-fit/1"}, {"variable", variable}};
  const auto describe = [&](const FitOfGpu& one, Json& to) {
    to["largest"] = values_of(variable, one.best());
    if (one.largest.size() > 1) {
      to["of_each"] = Json::array();
      for (const LargestValue& largest : one.largest) {
        Json entry = {{variable, optional_json(largest.value)}};
        for (const auto& [name, value] : largest.others) entry[name] = value;
        entry["measured"] = largest.computed_bytes == 0 || largest.as_computed || !largest.failed_above.empty();
        if (!largest.formula.empty()) entry["formula"] = largest.formula;
        to["of_each"].push_back(std::move(entry));
      }
    }
    const LargestValue* const best = one.best();
    const FitRun* const run = best == nullptr ? nullptr : find_run(one.runs, values_at(variable, *best));
    to["whole_run"] = run == nullptr ? Json(nullptr) : Json(run->is_whole());
    to["growth_per_step_bytes"] = run == nullptr ? Json(nullptr) : Json(run->experiment.growth_bytes);
    to["formula"] = text_or_null(best == nullptr ? "" : best->formula);
    to["as_computed"] = best != nullptr && best->as_computed;
    if (one.budget) to["token_budget"] = one.budget->tokens;
    if (!one.computed.empty()) to["computed"] = computed_json(one);
    to["runs"] = one.runs.size();
    to["calls_alone"] = one.calls_alone;
    to["tried"] = tried(one.runs, one.gpu == "real");
    to["learned_from"] = tried(one.runs, false, true);
  };
  if (found.size() == 1) {
    describe(found.front(), json);
    return to_text(json) + "\n";
  }
  json["devices"] = Json::array();
  for (const FitOfGpu& one : found) {
    Json entry = {{"device", one.gpu}};
    describe(one, entry);
    json["devices"].push_back(std::move(entry));
  }
  return to_text(json) + "\n";
}

std::string gpu_text(const SmallestGpu& gpu, const std::vector<FitRun>& runs) {
  if (gpu.bytes == 0) return fmt::format("oomdiag: it runs out of memory in {} on any GPU\n", gpu.fails_in);
  const std::string grows = growth_text(find_run(runs, {}, gpu.bytes));
  std::string text = "oomdiag: ";
  if (gpu.card) text += fmt::format("fits on {}, {} GiB (an estimate); ", gpu.card->id, to_gib(gpu.card->total_bytes));
  text += fmt::format("{}needs {} GiB\n\n", grows, to_gib(gpu.bytes));
  if (!gpu.fails_in.empty()) text += fmt::format("  with 2 MiB less it runs out of memory in {}\n", gpu.fails_in);
  if (gpu.takes_share) text += "  it takes a share of whatever GPU it runs on: on a larger one it takes more\n";
  text += reach_text(runs, {}, gpu.bytes);
  return text + fmt::format("  {} GiB of them are non-PyTorch memory (on a virtual GPU: an estimate); {}\n",
                            to_gib(gpu.non_pytorch_bytes), count_runs(runs));
}

namespace {

/// What is known of the GPU that was asked about.
std::string known_of(const FitRun& run) {
  const Experiment& experiment = run.experiment;
  if (experiment.ran_out()) return "out of memory in " + experiment.place;
  if (!experiment.passed()) return experiment.why;
  const std::string allocated = to_gib(experiment.allocated_bytes) + " GiB allocated";
  std::string reserved = fmt::format("{}, {} GiB reserved", allocated, to_gib(experiment.reserved_bytes));
  if (run.learns && run.values.empty()) return reserved;  // no GPU was named
  const std::string available = to_gib(experiment.available_bytes(run.gpu_bytes));
  switch (fits(run)) {
    case Fits::yes:
      return fmt::format("fits, {}{}", allocated, run.is_whole() ? "" : ", " + reach_of(run));
    case Fits::no:
      return fmt::format("does not fit: {} of {} GiB", allocated, available);
    case Fits::unknown:
      break;
  }
  return fmt::format("not known: {} where there was more memory, of {} GiB", reserved, available);
}

}  // namespace

std::string interrupted_text(const std::vector<FitRun>& runs) {
  std::string text = fmt::format("oomdiag: interrupted after {}\n", runs.empty() ? "0 runs" : count_runs(runs));
  for (const FitRun& run : runs) {
    const std::string gpu = run.learns ? "more memory than any GPU" : to_gib(run.memory_bytes) + " GiB of GPU";
    text += fmt::format("  {:<28} {}\n", run.values.empty() ? gpu : describe(run.values), known_of(run));
  }
  return text;
}

std::string interrupted_json(const std::vector<FitRun>& runs) {
  const Json json = {{"schema", "oomdiag-fit/1"},
                     {"interrupted", true},
                     {"runs", runs.size()},
                     {"tried", tried(runs)},
                     {"learned_from", tried(runs, false, true)}};
  return to_text(json) + "\n";
}

std::string gpu_json(const SmallestGpu& gpu, const std::vector<FitRun>& runs) {
  Json json = {{"schema", "oomdiag-fit/1"}};
  json["smallest_gpu_bytes"] = gpu.bytes > 0 ? Json(gpu.bytes) : Json(nullptr);
  json["smallest_device"] = text_or_null(gpu.card ? gpu.card->id : "");
  const FitRun* const run = find_run(runs, {}, gpu.bytes);
  json["whole_run"] = run == nullptr ? Json(nullptr) : Json(run->is_whole());
  json["growth_per_step_bytes"] = run == nullptr ? Json(nullptr) : Json(run->experiment.growth_bytes);
  json["runs"] = runs.size();
  json["tried"] = tried(runs);
  return to_text(json) + "\n";
}

}  // namespace oomdiag
