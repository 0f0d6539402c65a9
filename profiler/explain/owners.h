#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/replay/history.h"

namespace oomdiag {

/// Bytes in use at the described moment, under one heading.
struct OwnedBytes {
  std::string name;  ///< empty: not known
  int64_t bytes = 0;
  int64_t blocks = 0;

  bool operator==(const OwnedBytes&) const = default;
};

/// The same bytes sorted in five ways, each largest first and at most kMaxOwned long; what is cut off is summed up in a
/// last entry named "others". By op, source, line (the innermost outside of torch, a package's too) and shape each byte counts once. By module it counts for the module that
/// allocated it and for all those around it ("layer3" holds "layer3.5.conv2"); a parameter counts for its module.
struct Owners {
  std::vector<OwnedBytes> module{}, op{}, source{}, shape{}, line{};

  bool operator==(const Owners&) const = default;
};
inline constexpr size_t kMaxOwned = 100;

Owners list_owners(const MemoryState& state);

/// Who keeps a block alive.
enum class Keeper : uint8_t { autograd, module, optimizer, operation, library, program };
inline constexpr size_t kKeeperCount = 6;

std::string_view name_of(Keeper keeper);

/// The life of the largest block in use at the moment.
struct Lifetime {
  LiveBlock block{};
  Keeper kept_by = Keeper::program;
  std::optional<Where> freed_by{};  ///< the autograd node whose backward lets go of it

  bool operator==(const Lifetime&) const = default;
};

/// None if nothing is in use.
std::optional<Lifetime> follow_largest(const MemoryState& state);

}  // namespace oomdiag
