#include "samples/cases/bytes.h"

#include <algorithm>
#include <charconv>

#include "profiler/replay/history.h"
#include "profiler/report/make/holders.h"
#include "profiler/report/report.h"
#include "samples/cases/case_run.h"
#include "samples/cases/scopes.h"

namespace oomdiag {

const CaseRun* find_run(std::span<const CaseRun> runs, std::string_view variant) {
  const auto found = std::find_if(runs.begin(), runs.end(), [&](const CaseRun& run) { return run.variant == variant; });
  return found == runs.end() ? nullptr : &*found;
}

const ReportOfDevice& gpu_of(const CaseRun& run) {
  static const ReportOfDevice none;
  return run.report.main_device < run.report.devices.size() ? run.report.devices[run.report.main_device] : none;
}

int64_t peak_of(const CaseRun& run) { return gpu_of(run).peak.allocated_bytes; }

int64_t category_of(const CaseRun& run, Category category) { return bytes_of(gpu_of(run), category); }

int64_t phase_peak_of(const CaseRun& run, Phase phase) {
  int64_t peak = 0;
  for (const PhasePeak& one : gpu_of(run).phases) {
    if (one.phase == phase) peak = std::max(peak, one.allocated_bytes);
  }
  return peak;
}

const ScopeCall& last_call(const CaseRun& run, std::string_view scope) {
  static const ScopeCall none;
  const auto& calls = run.scopes.calls;
  const auto found = std::find_if(calls.rbegin(), calls.rend(), [&](const ScopeCall& c) { return c.name == scope; });
  return found == calls.rend() ? none : *found;
}

int64_t count_calls(const CaseRun& run, std::string_view prefix) {
  const auto begins = [&](const ScopeCall& call) { return call.name.starts_with(prefix); };
  return std::count_if(run.scopes.calls.begin(), run.scopes.calls.end(), begins);
}

int64_t fact_of(const CaseRun& run, const std::string& name) {
  const auto found = run.facts.find(name);
  int64_t value = 0;
  if (found != run.facts.end()) {
    std::from_chars(found->second.data(), found->second.data() + found->second.size(), value);
  }
  return value;
}

std::string_view raised_of(const CaseRun& run) {
  const auto found = run.facts.find("raised");
  return found == run.facts.end() ? std::string_view() : std::string_view(found->second);
}

}  // namespace oomdiag
