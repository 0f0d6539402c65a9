#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/launch/diagnosis.h"
#include "cli/launch/models.h"
#include "cli/process/launcher.h"
#include "cli/python/install.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// A sample whose case is to be explained: how its program is called for one of its variants.
struct CaseStudy {
  Model model;
  std::string variant;  ///< that was run; empty if the model has none
  /// The command line for a variant, on the device "cuda" or "cpu".
  std::function<std::vector<std::string>(const std::string& variant, const std::string& device)> compose;
};

/// What the program reported of itself: lines "fact NAME VALUE" in output.txt of a run folder. Of a name reported twice
/// the last.
std::map<std::string, std::string> read_facts(const std::filesystem::path& folder);

/// Runs the other variants of the sample as `request` was run, in a folder that goes away again, and says what they show
/// beside `first`. nullopt if there is nothing to say, or if the user interrupted.
std::optional<ReportCase> study_case(const CaseStudy& study, const DiagnosisRequest& request, const Diagnosis& first,
                                     const Install& install);

/// A run on the host: no recorder, no GPU. The figures are what the CPU allocator reported.
struct HostRun {
  Ending ending;
  std::map<std::string, std::string> facts;
  std::string output;  ///< its last lines, for when it failed
};
HostRun run_on_host(const std::vector<std::string>& program);

}  // namespace oomdiag
