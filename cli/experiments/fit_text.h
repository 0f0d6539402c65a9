#pragma once

#include <string>
#include <vector>

#include "cli/experiments/fit.h"
#include "cli/experiments/fit_values.h"

namespace oomdiag {

std::string values_text(const Variable& variable, const std::vector<FitOfGpu>& found);
std::string values_json(const std::string& variable, const std::vector<FitOfGpu>& found);
/// "6 runs, all measured", or how many of them taught the function.
std::string count_runs(const std::vector<FitRun>& runs);
/// How far the run went that shows that these values fit, one line: a whole run, or what was not seen. Empty where there is none.
std::string reach_text(const std::vector<FitRun>& runs, const Values& values, int64_t memory_bytes);
std::string gpu_text(const SmallestGpu& gpu, const std::vector<FitRun>& runs);
/// Of a search that somebody interrupted: what was measured.
std::string interrupted_text(const std::vector<FitRun>& runs);
std::string interrupted_json(const std::vector<FitRun>& runs);
std::string gpu_json(const SmallestGpu& gpu, const std::vector<FitRun>& runs);

}  // namespace oomdiag
