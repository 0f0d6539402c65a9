#pragma once

#include <span>
#include <string>
#include <vector>

#include "profiler/export/picture.h"

namespace oomdiag {

/// Grows a tree from leaves that are told one by one.
class OwnerTree {
 public:
  /// `path` from the outside in; empty names are left out.
  void add(std::span<const std::string> path, int64_t bytes, int64_t blocks);
  /// Children that hold less than a five-hundredth of all become "others".
  OwnerNode finish() &&;

 private:
  OwnerNode root_{.name = "allocated"};
};

/// Where a block belongs in the tree.
std::vector<std::string> path_of(const LiveBlock& block);

}  // namespace oomdiag
