#pragma once

#include <string>
#include <vector>

#include "cli/experiments/fit.h"
#include "cli/experiments/fit_lengths.h"
#include "profiler/export/surface_picture.h"
#include "profiler/shape_function/evaluate.h"

namespace oomdiag {

/// What was found on one GPU.
struct FitOfGpu {
  std::string gpu;
  std::vector<LargestValue> largest;  ///< one for each combination of the other variables
  std::vector<FitRun> runs;
  std::vector<std::pair<Values, ShapeEstimate>> computed{};  ///< that were asked for
  std::string unknown{};                                     ///< why these are not
  std::size_t calls_alone = 0;                               ///< operator calls that were made alone for their sizes
  std::optional<TokenBudget> budget{};
  std::optional<Surface> surface{};  ///< over both variables

  const LargestValue* best() const;  ///< the largest of them; null if nothing fits
};

std::string values_text(const Variable& variable, const std::vector<FitOfGpu>& found);
std::string values_json(const std::string& variable, const std::vector<FitOfGpu>& found);
/// "6 runs, all measured", or how many of them taught the function.
std::string count_runs(const std::vector<FitRun>& runs);
std::string gpu_text(const SmallestGpu& gpu, const std::vector<FitRun>& runs);
/// Of a search that somebody interrupted: what was measured.
std::string interrupted_text(const std::vector<FitRun>& runs);
std::string interrupted_json(const std::vector<FitRun>& runs);
std::string gpu_json(const SmallestGpu& gpu, const std::vector<FitRun>& runs);

}  // namespace oomdiag
