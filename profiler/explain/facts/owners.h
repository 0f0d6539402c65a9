#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/field.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// Bytes in use at the described moment, under one heading.
struct OwnedBytes {
  std::string name;
  int64_t bytes = 0;
  int64_t blocks = 0;

  bool operator==(const OwnedBytes&) const = default;
};

void visit_fields(auto& visit, Either<OwnedBytes> auto& value) {
  visit.object("allocated_bytes_of", "One row of `allocated_by`.");
  visit.or_null({"name", "of the module, op, line or shape"}, value.name);
  visit({"bytes", "in use"}, value.bytes);
  visit({"blocks", "in use"}, value.blocks);
}

/// The same bytes sorted in five ways, each largest first and at most kMaxOwned long; what is cut off is summed up in a
/// last entry named "others". By op, source, line (the innermost outside of torch, a package's too) and shape each byte counts once. By module it counts for the module that
/// allocated it and for all those around it ("layer3" holds "layer3.5.conv2"); a parameter counts for its module.
struct Owners {
  std::vector<OwnedBytes> module{}, op{}, source{}, shape{}, line{};

  bool operator==(const Owners&) const = default;
};

void visit_fields(auto& visit, Either<Owners> auto& value) {
  visit.object(
      "allocated_by",
      "The bytes in use, largest first; at most 100 rows each. All lists but `module` add up to `allocated_bytes`.");
  visit({"module", "a module holds what the modules inside of it hold"}, value.module);
  visit({"op", "by operator"}, value.op);
  visit({"source", "by the user's line"}, value.source);
  visit({"shape", "by shape and dtype"}, value.shape);
  visit({"line", "by the innermost line outside of torch"}, value.line);
}
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
