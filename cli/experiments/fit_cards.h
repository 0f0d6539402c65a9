#pragma once

#include <span>
#include <string>
#include <vector>

#include "cli/experiments/fit.h"

// fit --smallest-card --devices all: which of many cards the program fits on, from one run and two that prove it.
namespace oomdiag {

/// One card, and whether the program fits on it.
struct CardFit {
  CardEntry card{};
  bool fits = false;
  bool is_measured = false;  ///< by a run on this card; else computed from a run on another one
  bool is_exact =
      false;  ///< computed from a run on a card of the same compute capability, whose libraries choose alike
  int64_t allocated_bytes = 0, reserved_bytes = 0;  ///< at most; on a card that is full sooner, up to there
  std::string place{};                              ///< of the failure, where it was run and failed

  bool operator==(const CardFit&) const = default;
};

struct CardTable {
  std::string learned_on{};  ///< id of the card of the first run
  std::vector<CardFit> cards{};
  std::string unknown{};  ///< why nothing could be computed, or empty

  /// The first that fits; null if none does.
  const CardFit* smallest() const;
};

/// Runs the program once with more memory than it needs, runs the allocator's algorithm for each of `cards`, by ascending memory,
/// and proves the smallest that fits, and the one before it, by runs. `runs` takes all that were made.
CardTable find_cards(const FitRequest& request, std::span<const CardEntry> cards, Experiments& experiments,
                     const std::function<void(std::size_t)>& tell, std::vector<FitRun>& runs);

std::string cards_text(const CardTable& table, const std::vector<FitRun>& runs);
std::string cards_json(const CardTable& table, const std::vector<FitRun>& runs);

}  // namespace oomdiag
