#include <fmt/format.h>

#include <algorithm>

#include "cli/experiments/run_ranks.h"

// Ranks lie in a grid. A pipeline's ranks are `stride` apart, so the stage of any rank follows from those of one pipeline.

namespace oomdiag {
namespace {

struct Grid {
  int stages = 1;
  int stride = 1;

  int stage(int rank) const { return rank / stride % stages; }
};

Grid grid_of(const std::vector<int>& stages) {
  if (stages.size() < 2) return {};
  return {.stages = static_cast<int>(stages.size()), .stride = std::max(1, stages[1] - stages[0])};
}

/// "0-7, 16-23": the ranks of a stage.
std::string ranks_of(const Grid& grid, int stage, int world_size) {
  std::string text;
  constexpr int kMaxRanges = 3;
  int ranges = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    if (grid.stage(rank) != stage || (rank > 0 && grid.stage(rank - 1) == stage)) continue;
    int last = rank;
    while (last + 1 < world_size && grid.stage(last + 1) == stage) ++last;
    if (++ranges > kMaxRanges) return text + ", …";
    text += (text.empty() ? "" : ", ") + (last > rank ? fmt::format("{}-{}", rank, last) : fmt::format("{}", rank));
  }
  return text;
}

}  // namespace

std::vector<RankKind> find_kinds(int world_size, const std::vector<int>& stages) {
  const Grid grid = grid_of(stages);
  std::vector<RankKind> kinds;
  for (int stage = 0; stage < grid.stages; ++stage) {
    int first = -1, last = -1;
    for (int rank = 0; rank < world_size; ++rank) {
      if (grid.stage(rank) != stage) continue;
      if (first < 0) first = rank;
      last = rank;
    }
    if (first < 0) continue;
    const std::string all = ranks_of(grid, stage, world_size);
    kinds.push_back({.rank = first, .stands_for = last > first ? fmt::format("{} but {}", all, last) : ""});
    if (last > first) kinds.push_back({.rank = last, .stands_for = {}});
  }
  return kinds;
}

std::string kinds_text(const RanksDiagnosis& diagnosis) {
  std::string text;
  for (std::size_t i = 0; i < diagnosis.kinds.size(); ++i) {
    const RankKind& kind = diagnosis.kinds[i];
    if (!kind.stands_for.empty()) text += fmt::format("  rank {} stands for ranks {}\n", kind.rank, kind.stands_for);
    if (!diagnosis.why_failed[i].empty()) text += fmt::format("  rank {}: {}\n", kind.rank, diagnosis.why_failed[i]);
  }
  return text;
}

}  // namespace oomdiag
