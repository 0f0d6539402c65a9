#include "profiler/diff/budget.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/diff/diff.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/report.h"
#include "profiler/report/words/markup.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

/// The highest of all GPUs and ranks.
struct Highest {
  int64_t allocated = 0, reserved = 0, growth = 0;
};

Highest highest_of(const Report& report) {
  Highest highest;
  const auto take = [&](const ReportPeak& peak) {
    highest.allocated = std::max(highest.allocated, peak.allocated_bytes);
    highest.reserved = std::max(highest.reserved, peak.reserved_bytes);
  };
  for (const ReportRank& rank : report.ranks) take(rank.peak);
  for (const ReportOfDevice& device : report.devices) {
    take(device.peak);
    highest.growth = std::max(highest.growth, growth_of(device));
  }
  return highest;
}

Verdict judge(const char* budget, int64_t found, int64_t allowed, const std::string& of) {
  const bool kept = found <= allowed;
  const std::string above = kept ? "" : fmt::format(", {} above", with_unit(found - allowed));
  return {budget, kept, fmt::format("{} of {}{}{}", with_unit(found), with_unit(allowed), of, above)};
}

int64_t with_tolerance(int64_t bytes, double tolerance) {
  return bytes + static_cast<int64_t>(static_cast<double>(bytes) * tolerance);
}

// The first rows of the difference say what to look at.
std::string what_grew(const Report& before, const Report& after) {
  const ReportDiff found = diff(before, after);
  for (const auto* rows : {&found.modules, &found.lines, &found.ops, &found.categories}) {
    for (const DiffRow& row : *rows) {
      if (row.change() > 0 && !row.name.empty()) {
        return fmt::format("; most of it: {} +{}", printable_end(row.name, 60), with_unit(row.change()));
      }
    }
  }
  return "";
}

Verdict against_baseline(const char* budget, int64_t found, int64_t before, const Report& report,
                         const Budgets& budgets) {
  const std::string of = fmt::format(" ({} before, {:g} % allowed)", with_unit(before), 100 * budgets.tolerance);
  Verdict verdict = judge(budget, found, with_tolerance(before, budgets.tolerance), of);
  if (!verdict.kept) verdict.words += what_grew(*budgets.baseline, report);
  return verdict;
}

// Its figures end where it did.
Verdict judge_outcome(const Report& report) {
  if (report.outcome == "out_of_memory") return {"outcome", false, "the run is out of memory"};
  if (report.outcome == "caught") return {"outcome", false, "the program ran out of memory and caught it"};
  if (report.devices.empty()) return {"outcome", false, "nothing was allocated on a GPU"};
  for (const ReportOfDevice& device : report.devices) {
    if (device.peak.host_memory_bytes > 0) {
      return {"outcome", false,
              fmt::format("does not fit the GPU: {} of it in host memory", with_unit(device.peak.host_memory_bytes))};
    }
    if (!device.out_of_memory_near_step) continue;
    return {"outcome", false,
            fmt::format("fits so far, and grows: out of memory near step {}", *device.out_of_memory_near_step)};
  }
  if (report.outcome == "ok") return {"outcome", true, report.snapshot ? "a snapshot without an OOM" : "the run fits"};
  const std::string how =
      report.exit_code ? fmt::format("exit code {}", *report.exit_code) : printable(report.outcome, 40);
  return {"outcome", false, fmt::format("the run failed ({})", how)};
}

}  // namespace

std::vector<Verdict> check(const Report& report, const Budgets& budgets) {
  const Highest found = highest_of(report);
  std::vector<Verdict> verdicts = {judge_outcome(report)};
  if (budgets.max_allocated_bytes) {
    verdicts.push_back(judge("max allocated", found.allocated, *budgets.max_allocated_bytes, ""));
  }
  if (budgets.max_reserved_bytes) {
    verdicts.push_back(judge("max reserved", found.reserved, *budgets.max_reserved_bytes, ""));
  }
  if (budgets.max_growth_bytes) {
    verdicts.push_back(judge("max growth", found.growth, *budgets.max_growth_bytes, " per step"));
  }
  if (!budgets.baseline) return verdicts;
  const Highest before = highest_of(*budgets.baseline);
  verdicts.push_back(against_baseline("baseline allocated", found.allocated, before.allocated, report, budgets));
  verdicts.push_back(against_baseline("baseline reserved", found.reserved, before.reserved, report, budgets));
  const int64_t allowed_growth = with_tolerance(before.growth, budgets.tolerance);
  verdicts.push_back(judge("baseline growth", found.growth, allowed_growth, " per step"));
  return verdicts;
}

std::string to_junit(const std::vector<Verdict>& verdicts, const std::string& suite) {
  const auto failures = std::ranges::count(verdicts, false, &Verdict::kept);
  std::string text = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"oomdiag check\" tests=\"{}\" failures=\"{}\">\n",
      verdicts.size(), failures);
  for (const Verdict& one : verdicts) {
    text += fmt::format(R"(  <testcase classname="{}" name="{}">)", escape_markup(printable(suite, 200)),
                        escape_markup(one.budget));
    text += one.kept ? fmt::format("<system-out>{}</system-out>", escape_markup(one.words))
                     : fmt::format(R"(<failure message="{}"/>)", escape_markup(one.words));
    text += "</testcase>\n";
  }
  return text + "</testsuite>\n";
}

std::string to_github(const std::vector<Verdict>& verdicts, const std::string& suite) {
  std::string text;
  for (const Verdict& one : verdicts) {
    if (one.kept) continue;
    std::string words = fmt::format("{}: {}", printable(suite, 200), one.words);
    for (size_t at = 0; (at = words.find('%', at)) != words.npos; at += 3) words.replace(at, 1, "%25");
    text += fmt::format("::error title=oomdiag {}::{}\n", one.budget, words);
  }
  return text;
}

}  // namespace oomdiag
