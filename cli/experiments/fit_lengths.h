#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/experiments/experiment.h"
#include "cli/experiments/fit.h"
#include "cli/experiments/fit_function.h"

// fit --lengths: samples of different lengths, padded to the longest of their batch. A batch finder that tries the first batches of a
// data set finds a size that fails in the epoch that puts long samples together; the function knows the worst batch beforehand.
namespace oomdiag {

/// What the program's {length} stands for.
inline constexpr const char* kLength = "length";

/// In place of a file: the lengths are those of the samples that the program's own DataLoader goes through.
inline constexpr const char* kLoader = "loader";

/// The lengths of a data set.
struct Lengths {
  std::vector<int64_t> distinct{};  ///< ascending
  int64_t samples = 0;              ///< whose lengths are known
  int64_t of_samples = 0;           ///< of so many in all
  std::vector<std::map<int64_t, int64_t>>
      loaders{};  ///< of each DataLoader the place of a sample by its length; empty: of a file

  /// The variable that runs to learn from take them as: the shortest, a middle one, the longest.
  Variable variable() const;
  /// What a run is to be given so that all batches of its DataLoaders are of this length, or the next that there is.
  nlohmann::json batches_of(int64_t length) const;
};

/// Numbers, one for each sample, separated by white space or commas. Throws Error(input).
Lengths read_lengths(const std::filesystem::path& file);
/// By one run of the program with these values, on the largest GPU; see extension/python/fixes/oomdiag_fixes/loader_batches.py.
/// Throws Error(input) where it goes through no DataLoader, or all samples are of one size.
Lengths look_at_loaders(FitRequest request, Experiments& experiments, const Values& values);

/// Batches of as many samples as fit into a budget of padded tokens.
struct TokenBudget {
  int64_t tokens = 0;       ///< the largest with which no batch fails
  LargestValue tightest{};  ///< at the length that sets it, with runs as proof
};

/// nullopt where the memory is not known as a function.
std::optional<TokenBudget> find_token_budget(Fitter& fitter, const Variable& batch, const Lengths& lengths,
                                             MemoryFunction& function);

std::string lengths_text(const Lengths& lengths, const LargestValue& any_order,
                         const std::optional<TokenBudget>& budget);

}  // namespace oomdiag
