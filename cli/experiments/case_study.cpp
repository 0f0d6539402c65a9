#include "cli/experiments/case_study.h"

#include <csignal>
#include <fstream>

#include "cli/launch/diagnosis.h"
#include "cli/process/launcher.h"
#include "cli/process/temporary_folder.h"
#include "cli/python/install.h"
#include "cli/reports/run_folder.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"
#include "samples/cases/case_run.h"
#include "samples/cases/notes.h"
#include "samples/cases/scopes.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

CaseRun read_run(const std::string& variant, const Diagnosis& diagnosis) {
  CaseRun run{.variant = variant, .report = {}, .scopes = {}, .facts = read_facts(diagnosis.folder)};
  run.report.outcome = "failed";
  if (!diagnosis.report) return run;
  run.report = *diagnosis.report;
  run.scopes = read_scopes(read_trace(diagnosis.folder / "trace"));
  return run;
}

CaseRun read_host_run(const HostRun& host) {
  CaseRun run{.variant = "host", .report = {}, .scopes = {}, .facts = host.facts};
  run.report.outcome = host.ending.code() == 0 ? "ok" : "failed";
  return run;
}

/// The runs beside the first; shorter than they should be if the user interrupted.
bool run_others(const CaseStudy& study, DiagnosisRequest request, const Install& install, std::vector<CaseRun>& runs) {
  const TemporaryFolder folder;
  request.base = folder.path();
  for (const std::string& variant : study.model.variants) {
    if (variant == study.variant) continue;
    request.program = study.compose(variant, "cuda");
    const Diagnosis diagnosis = diagnose(request, install);
    if (diagnosis.ending.signal == SIGINT) return false;
    runs.push_back(read_run(variant, diagnosis));
  }
  if (study.model.reference_case != "S1") return true;
  const HostRun host = run_on_host(study.compose(study.variant, "cpu"));
  runs.push_back(read_host_run(host));
  return host.ending.signal != SIGINT;
}

}  // namespace

std::map<std::string, std::string> read_facts(const fs::path& folder) {
  constexpr std::string_view kPrefix = "fact ";
  std::map<std::string, std::string> facts;
  std::ifstream stream(folder / "output.txt");
  for (std::string line; std::getline(stream, line);) {
    const std::size_t end = line.find(' ', kPrefix.size());
    if (line.starts_with(kPrefix) && end != line.npos) {
      facts[line.substr(kPrefix.size(), end - kPrefix.size())] = line.substr(end + 1);
    }
  }
  return facts;
}

std::optional<ReportCase> study_case(const CaseStudy& study, const DiagnosisRequest& request, const Diagnosis& first,
                                     const Install& install) {
  std::vector<CaseRun> runs{read_run(study.variant, first)};
  if (!run_others(study, request, install, runs)) return std::nullopt;
  return explain_case(study.model.reference_case, study.model.about, runs);
}

HostRun run_on_host(const std::vector<std::string>& program) {
  const TemporaryFolder base;
  fs::path folder;
  HostRun run;
  run.ending = launch({.arguments = program, .environment = {}, .keeps_output = true},
                      [&](pid_t child) { return folder = make_run_folder(base.path(), child); });
  run.facts = read_facts(folder);
  run.output = last_lines(folder / "output.txt");
  return run;
}

}  // namespace oomdiag
