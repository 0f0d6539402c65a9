#include <array>

#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/owners.h"

namespace oomdiag {

std::string_view name_of(GrowthKind kind) {
  constexpr std::array<std::string_view, 3> kNames = {"retained_graph", "kept_tensors", "growing_buffer"};
  return kNames[static_cast<size_t>(kind)];
}

std::string_view name_of(Keeper keeper) {
  constexpr std::array<std::string_view, kKeeperCount> kNames = {"autograd",  "module",  "optimizer",
                                                                 "operation", "library", "program"};
  return kNames[static_cast<size_t>(keeper)];
}

}  // namespace oomdiag
