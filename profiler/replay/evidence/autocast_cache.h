#pragma once

#include "profiler/replay/history.h"

namespace oomdiag {

/// What autocast takes at a moment.
struct AutocastUse {
  std::string dtype{};      ///< empty: nothing was made under autocast
  int64_t made_bytes = 0;   ///< by forward ops under autocast
  int64_t cache_bytes = 0;  ///< of these: casts of weights, which autocast keeps until its region ends
  int64_t repeated_bytes =
      0;  ///< casts of weights that were cast before: nothing keeps the first cast for the next use
  int64_t repeated_count = 0;
  bool region_open = false;  ///< the moment lies inside of the region

  bool operator==(const AutocastUse&) const = default;
};

/// Whether the operator that allocated, inside of another, makes what a cast is copied into.
bool makes_copy(std::string_view inner);

/// A weight's cast is found as the cast of half a float32 parameter's bytes, made under autocast where that parameter's
/// module ran, or of the parameter's shape; each parameter has at most one.
AutocastUse find_autocast(const MemoryState& state);

}  // namespace oomdiag
