#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/device/gpus.h"
#include "cli/experiments/border_search.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fit_function.h"
#include "cli/experiments/fit_lengths.h"
#include "profiler/export/surface_picture.h"
#include "profiler/shape_function/evaluate.h"

// fit --vary: the largest value of the first variable, for all values of the others, on one GPU after the other.
namespace oomdiag {

/// What is asked of each GPU.
struct ValueQuestion {
  std::vector<Variable> variables{};  ///< the first one is searched
  std::optional<Lengths> lengths{};   ///< of a data set's samples: what its batches may hold
  std::vector<Values> points{};       ///< to be computed besides
  bool only_points = false;           ///< … and nothing else
  bool wants_surface = false;         ///< over both variables, to draw

  /// The variables that runs are to learn sizes of: the length, too.
  std::vector<Variable> learned() const;
  /// The values of the others, of which each has a border.
  std::vector<Values> borders() const;
};

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

/// Asks one GPU after the other. What one has shown is a good guess for the next.
class ValueSearch {
 public:
  /// `on_done`: after each run, of all GPUs.
  ValueSearch(FitRequest request, Experiments& experiments, ValueQuestion question,
              std::function<void(std::size_t)> on_done)
      : request_(std::move(request)),
        experiments_(experiments),
        question_(std::move(question)),
        on_done_(std::move(on_done)) {}

  /// An entry that only has a name is the real GPU. Throws what Fitter throws: runs() has what was over.
  FitOfGpu search(const GpuEntry& gpu);
  /// Those of all GPUs so far.
  const std::vector<FitRun>& runs() const { return runs_; }

 private:
  void answer(Fitter& fitter, FitOfGpu& found);
  MemoryFunction find_borders(Fitter& fitter, FitOfGpu& found);

  FitRequest request_;
  Experiments& experiments_;
  ValueQuestion question_;
  std::function<void(std::size_t)> on_done_;
  std::vector<FitRun> runs_;
  std::map<Values, std::optional<Line>> lines_;
};

}  // namespace oomdiag
