#pragma once

#include <cstdint>
#include <vector>

#include "profiler/replay/history.h"
#include "profiler/trace/referrer_words.h"

namespace oomdiag {

/// What keeps growing from step to step.
enum class GrowthKind : uint8_t {
  retained_graph,  ///< each step's autograd graph stays alive, with what it saved
  kept_tensors,    ///< each step leaves tensors behind: outputs in a list, losses without item()
  growing_buffer   ///< one tensor is made anew, larger each time
};

inline constexpr size_t kGrowthKindCount = 3;

std::string_view name_of(GrowthKind kind);

/// A place of the program that keeps more with each step.
struct GrowingPlace {
  Where where{};
  uint32_t context = 0;  ///< PlaceCurve::context
  int64_t bytes_per_step = 0;
  int64_t live_bytes = 0;       ///< at the end of the last step
  int64_t blocks = 0;           ///< likewise
  bool differentiated = false;  ///< PlaceCurve::differentiated

  bool operator==(const GrowingPlace&) const = default;
};

/// Growth that has one reason.
struct Growth {
  GrowthKind kind = GrowthKind::kept_tensors;
  int64_t bytes_per_step = 0;  ///< the median of what the steps added, over all its places
  int64_t grown_bytes = 0;     ///< what lives at the end of last_step beyond what lived at the end of first_step
  uint32_t first_step = 0, last_step = 0;
  /// The last place of a step that grows: what the program holds keeps the rest, if there is a graph. Of detached tensors the largest.
  Where held{};
  std::vector<GrowingPlace> places{};  ///< fastest first, at most kMaxGrowingPlaces
  size_t place_count = 0;
  std::string referrer{};      ///< "list 'history' in train.py": the variable that keeps most of it, or empty
  int64_t referred_bytes = 0;  ///< of tensors among it that variables refer to themselves, and not through a graph

  /// Whether what was made there, in this context of the trace (0: not known), is among what grows.
  bool has(const Where& made, uint32_t context) const;

  /// Whether so many nodes may be those of all its steps: in each of them about one for each of its places that left something.
  bool leads_to_all_steps(int64_t nodes) const;

  /// Whether most of it is tensors that variables refer to.
  bool is_referred() const { return referred_bytes > 0 && referred_bytes * 2 >= grown_bytes; }

  /// Whether a container of the program collects it: what one step leaves there the next one does not use.
  bool is_collected() const { return is_container(referrer); }

  bool operator==(const Growth&) const = default;
};
inline constexpr size_t kMaxGrowingPlaces = 10;

/// What grows, fastest first. Levels are read where steps end, so what a step uses itself does not count. Growth must
/// show in at least 3 steps after the first one, hardly ever fall, and go on at its pace to the end: optimizer state made
/// in step 1, warm-up and caches that fill up do not. A tensor that becomes larger only counts where the requests of the
/// other places have not grown as much: else the batch did. Where the first steps were overwritten, what they left behind
/// counts too, and growth that is too slow for the steps that are left is found if it began with the run. `may_be_graph`: false where
/// the program builds none, though it runs with gradients enabled.
std::vector<Growth> find_growth(const StepCurves& curves, bool may_be_graph = true);

/// Says of each the variable of the program that keeps most of it: of a graph the one with most nodes, else the one with most
/// tensors. `are_all`: the search for referrers came to its end; else they are a sample of those that there are, and a container
/// that has most of the sample has most of all.
void find_referrers(const std::vector<Referrer>& referrers, std::vector<Growth>& growths, bool are_all = true);

/// Bytes that all of `growths` added since their first steps.
int64_t sum_grown(const std::vector<Growth>& growths);
/// Bytes that a step adds to all of them.
int64_t sum_per_step(const std::vector<Growth>& growths);

}  // namespace oomdiag
