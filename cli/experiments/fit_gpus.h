#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/device/gpus.h"
#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"

// fit --smallest-card --devices all: which of many GPUs the program fits on, from one run and two that prove it.
namespace oomdiag {

/// One GPU, and whether the program fits on it.
struct GpuFit {
  GpuEntry gpu{};
  bool fits = false;
  bool is_measured = false;  ///< by a run on this GPU; else computed from a run on another one
  bool is_exact = false;  ///< computed from a run on a GPU of the same compute capability, whose libraries choose alike
  int64_t allocated_bytes = 0, reserved_bytes = 0;  ///< at most; on a GPU that is full sooner, up to there
  std::string place{};                              ///< of the failure, where it was run and failed

  bool operator==(const GpuFit&) const = default;
};

struct GpuTable {
  std::string learned_on{};  ///< id of the GPU of the first run
  std::vector<GpuFit> gpus{};
  std::string unknown{};  ///< why nothing could be computed, or empty

  /// The first that fits; null if none does.
  const GpuFit* smallest() const;
};

/// Runs the program once with more memory than it needs, runs the allocator's algorithm for each of `gpus`, by ascending memory,
/// and proves the smallest that fits, and the one before it, by runs. `runs` takes all that were made.
GpuTable find_gpus(const FitRequest& request, std::span<const GpuEntry> gpus, Experiments& experiments,
                   const std::function<void(std::size_t)>& on_done, std::vector<FitRun>& runs);

/// The first of `gpus`, by ascending memory, that has what is needed: `bytes` of a GPU like `measured_on`, each beside its own context.
std::optional<GpuEntry> find_card(std::span<const GpuEntry> gpus, const GpuEntry& measured_on, int64_t bytes);

std::string gpus_text(const GpuTable& table, const std::vector<FitRun>& runs);
std::string gpus_json(const GpuTable& table, const std::vector<FitRun>& runs);

}  // namespace oomdiag
