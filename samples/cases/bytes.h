#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "samples/cases/case_run.h"
#include "samples/cases/scopes.h"

// The figures of a run that several cases ask for. What a run does not have is 0.
namespace oomdiag {

/// The run of this variant; nullptr if it is not among them.
const CaseRun* find_run(std::span<const CaseRun> runs, std::string_view variant);

/// The GPU that the report describes; one without anything where there is none.
const ReportOfDevice& gpu_of(const CaseRun& run);

int64_t peak_of(const CaseRun& run);
/// Bytes of a category at the peak, or at the failure.
int64_t category_of(const CaseRun& run, Category category);
/// The highest peak of a phase over all steps.
int64_t phase_peak_of(const CaseRun& run, Phase phase);
/// The last call of a scope, one that says nothing if there is none.
const ScopeCall& last_call(const CaseRun& run, std::string_view scope);
/// How many calls of scopes there were whose names begin so.
int64_t count_calls(const CaseRun& run, std::string_view prefix);
/// A number that the program printed.
int64_t fact_of(const CaseRun& run, const std::string& name);
/// What the program said of the exception that it caught, or empty.
std::string_view raised_of(const CaseRun& run);

}  // namespace oomdiag
