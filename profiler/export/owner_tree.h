#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "profiler/export/picture.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// Grows a tree from leaves that are added one by one.
class OwnerTree {
 public:
  /// `path` from the outside in; empty names are left out.
  void add(std::span<const std::string> path, int64_t bytes, int64_t blocks);
  /// Children that hold less than a five-hundredth of all become "others".
  OwnerNode finish() &&;

 private:
  /// A node, and where each of its children lies.
  struct Growing {
    OwnerNode node{};
    std::vector<Growing> children{};
    std::unordered_map<std::string, size_t> by_name{};

    Growing& child(const std::string& name);
    OwnerNode finish() &&;
  };
  Growing root_{.node = {.name = "allocated"}};
};

/// Where a block belongs in the tree.
std::vector<std::string> path_of(const LiveBlock& block);

}  // namespace oomdiag
