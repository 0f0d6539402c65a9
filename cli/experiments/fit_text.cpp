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
#include "profiler/replay/allocator/settings.h"
#include "profiler/report/text/table.h"

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

const FitRun* find_run(const std::vector<FitRun>& runs, const Values& values) {
  const auto run =
      std::find_if(runs.begin(), runs.end(), [&](const FitRun& one) { return one.values == values && !one.learns; });
  return run == runs.end() ? nullptr : &*run;
}

std::string stopped(const std::vector<FitRun>& runs) {
  uint32_t last = 0;
  for (const FitRun& run : runs) last = std::max(last, run.experiment.stopped_at_step);
  return last == 0 ? "" : fmt::format("; runs were ended when their peak was steady, at step {} at the latest", last);
}

std::string about_value(const Variable& variable, const LargestValue& largest, const std::vector<FitRun>& runs) {
  Values values = largest.others;
  if (!largest.value) {
    values[variable.name] = variable.value(0);
    const FitRun* run = find_run(runs, values);
    return fmt::format("oomdiag: {} already runs out of memory in {}\n", describe(values),
                       run == nullptr ? "" : run->experiment.place);
  }
  values[variable.name] = *largest.value;
  std::string text = fmt::format("oomdiag: fits up to {}\n\n", describe(values));
  if (const FitRun* run = find_run(runs, values)) {
    text += fmt::format("  its peak is {} GiB allocated, {} GiB reserved\n", to_gib(run->experiment.allocated_bytes),
                        to_gib(run->experiment.reserved_bytes));
  }
  if (!largest.formula.empty()) text += fmt::format("  its tensors at the peak take {}\n", largest.formula);
  if (!largest.doubt.empty()) text += fmt::format("  what is computed near it is an estimate: {}\n", largest.doubt);
  if (largest.is_last_of_range) text += "  it is the largest that was asked for\n";
  for (const int64_t above : largest.failed_above) {
    values[variable.name] = above;
    const FitRun* run = find_run(runs, values);
    if (run != nullptr && above == largest.failed_above.front()) {
      text += fmt::format("  {} runs out of memory in {}", above, run->experiment.place);
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
  for (const FitRun& run : runs) {
    values[variable.name] = run.values.at(variable.name);
    if (!run.experiment.passed() && run.values == values &&
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

std::string table(const Variable& variable, const std::vector<FitOfGpu>& found) {
  std::string text = fmt::format("oomdiag: the largest {} that fits\n\n", variable.name);
  std::vector<FitRun> runs;
  for (const FitOfGpu& one : found) {
    runs.insert(runs.end(), one.runs.begin(), one.runs.end());
    for (const LargestValue& largest : one.largest) {
      Values values = largest.others;
      values[variable.name] = largest.value.value_or(0);
      const FitRun* run = largest.value ? find_run(one.runs, values) : nullptr;
      text +=
          fmt::format("  {} {} {:>8}   {}\n", padded(one.gpu, 18),
                      padded(describe(largest.others), largest.others.empty() ? 0 : 20),
                      largest.value ? std::to_string(*largest.value) : "none",
                      run != nullptr  ? fmt::format("{:>7} GiB allocated", to_gib(run->experiment.allocated_bytes))
                      : largest.value ? fmt::format("{:>7} GiB allocated (computed)", to_gib(largest.computed_bytes))
                                      : "");
    }
  }
  return text + fmt::format("\n  {}\n", count_runs(runs));
}

/// On a real GPU with times: on a virtual one work takes none.
Json tried(const std::vector<FitRun>& runs, bool is_real = false, bool learns = false) {
  Json list = Json::array();
  for (const FitRun& run : runs) {
    if (run.learns != learns) continue;
    Json one = Json::object();
    for (const auto& [name, value] : run.values) one[name] = value;
    if (run.memory_bytes > 0) one["memory_bytes"] = run.memory_bytes;
    one["fits"] = run.experiment.passed();
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

std::string values_text(const Variable& variable, const std::vector<FitOfGpu>& found) {
  if (found.size() > 1 || found.front().largest.size() > 1) return table(variable, found);
  const FitOfGpu& one = found.front();
  if (one.largest.empty()) {
    return fmt::format("oomdiag: computed, without a search for the border\n\n{}  {}\n", computed_text(one),
                       count_runs(one.runs));
  }
  return about_value(variable, one.largest.front(), one.runs) + computed_text(one) +
         fmt::format("  {}{}{}\n", count_runs(one.runs), stopped(one.runs), calls_text(one.calls_alone));
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
  std::string text = fmt::format("oomdiag: needs {} GiB: the smallest GPU on which it passes has {} bytes\n\n",
                                 to_gib(gpu.bytes), gpu.bytes);
  if (!gpu.fails_in.empty()) text += fmt::format("  with 2 MiB less it runs out of memory in {}\n", gpu.fails_in);
  if (gpu.takes_share) text += "  it takes a share of whatever GPU it runs on: on a larger one it takes more\n";
  return text + fmt::format("  {:.2f} GiB of them are non-PyTorch memory (on a virtual GPU: an estimate); {}{}\n",
                            static_cast<double>(gpu.non_pytorch_bytes) / static_cast<double>(kGiB), count_runs(runs),
                            stopped(runs));
}

std::string interrupted_text(const std::vector<FitRun>& runs) {
  std::string text = fmt::format("oomdiag: interrupted after {}{}\n", counted(runs.size(), "run"),
                                 runs.empty() ? "" : ", all measured\n");
  for (const FitRun& run : runs) {
    const Experiment& experiment = run.experiment;
    const std::string gpu = run.memory_bytes > 0 ? fmt::format("{} GiB of GPU", to_gib(run.memory_bytes)) : "";
    text += fmt::format("  {:<28} {}\n", run.values.empty() ? gpu : describe(run.values),
                        experiment.passed() ? fmt::format("fits, {} GiB allocated", to_gib(experiment.allocated_bytes))
                        : experiment.ran_out() ? "out of memory in " + experiment.place
                                               : experiment.why);
  }
  return text;
}

std::string interrupted_json(const std::vector<FitRun>& runs) {
  const Json json = {{"schema", "oomdiag-fit/1"}, {"interrupted", true}, {"runs", runs.size()}, {"tried", tried(runs)}};
  return to_text(json) + "\n";
}

std::string gpu_json(const SmallestGpu& gpu, const std::vector<FitRun>& runs) {
  Json json = {{"schema", "oomdiag-fit/1"}};
  json["smallest_gpu_bytes"] = gpu.bytes > 0 ? Json(gpu.bytes) : Json(nullptr);
  json["runs"] = runs.size();
  json["tried"] = tried(runs);
  return to_text(json) + "\n";
}

}  // namespace oomdiag
