#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/explain/reason.h"

// What `configure` of a row (FixRow, fixes.h) is asked about: the program, as its complete run showed it. Another question of a fix is a member
// here, and a line of look.py where that has to look.

namespace oomdiag {

/// What a complete run showed of the program; see extension/python/fixes/oomdiag_fixes/look.py.
struct ProgramProfile {
  /// Shapes of what the outermost modules gave, by the rank of the process. They may differ from rank to rank.
  using Outputs = std::map<int, std::vector<nlohmann::json>>;
  /// A module that is one of several alike, and can be run again in backward.
  struct Block {
    std::string container, path;
    int64_t leaves = 0;       ///< modules without children in it
    int64_t ops = 0;          ///< that autograd recorded of a call; 0 = not seen
    int64_t saved_bytes = 0;  ///< what autograd keeps of it
    bool operator==(const Block&) const = default;
  };
  std::vector<Block> blocks{};  ///< in their order
  int64_t leaves = 0;           ///< modules without children
  /// How many modules are of a class, "Conv2d", or of one that is derived from it; without those that work in place.
  std::map<std::string, int64_t, std::less<>> modules{};
  int64_t bytes_of_float32 = 0;  ///< parameters
  bool has_root = false, is_trained = false, has_autocast = false, keeps_gradients = false;
  bool has_optimizer = false;   ///< of torch.optim, neither fused nor with foreach off
  bool has_adam = false;        ///< torch.optim.Adam or AdamW
  bool has_8bit = false;        ///< a package that brings optimizers of 8 bits
  std::string sequential{};     ///< path of the nn.Sequential with most plain layers; empty: the model itself
  int64_t layers = 0;           ///< of it
  std::string batch_option{};   ///< of its command line, "--batch-size"; empty: it takes none
  int64_t batch_of_option = 0;  ///< its value
  int64_t logits = 0;           ///< elements of the largest [N, C] that a cross-entropy took
  int64_t loader_batch = 0;     ///< the largest of a DataLoader
  bool reads_input = false;     ///< its stdin
  Outputs outputs{};

  int64_t count_modules(std::string_view of_class) const {
    const auto found = modules.find(of_class);
    return found == modules.end() ? 0 : found->second;
  }
  bool operator==(const ProgramProfile&) const = default;
};

/// A program, its complete run and its failure, as a row of a fix looks at them to say whether its module is worth a run.
struct ProgramFacts {
  const ProgramProfile& profile;
  bool runs_backward = false;
  bool grows = false;             ///< from step to step
  bool activations_count = true;  ///< tensors of forward and backward are a part of the peak that is worth halving
  int64_t optimizer_peak_bytes = 0, available_bytes = 0;
  int compute_major = 0;             ///< of the device, 0 = not known
  uint32_t failing_step = 0;         ///< 0 = it fits
  std::optional<Reason> reason{};    ///< of the failure
  std::vector<std::string> stack{};  ///< calls that led to it, "train.py:31 in forward", innermost first
};

/// How the Python module of a fix is applied to a program.
struct ModuleSettings {
  nlohmann::json settings = nlohmann::json::object();  ///< what its apply() gets
  std::string variant{};                               ///< behind the id of the row: "2" of "accumulate_2"
  std::string missing{};                               ///< what it needs and is not there: it is not run
};

/// Without settings of its own, or not at all.
inline std::optional<ModuleSettings> unless(bool is_useless) {
  return is_useless ? std::nullopt : std::optional<ModuleSettings>(std::in_place);
}

}  // namespace oomdiag
