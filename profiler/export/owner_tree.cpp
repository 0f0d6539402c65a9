#include "profiler/export/owner_tree.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "profiler/export/picture.h"
#include "profiler/fold_indices.h"
#include "profiler/replay/history.h"
#include "profiler/report/words/place_text.h"

namespace oomdiag {
namespace {

constexpr int64_t kLeastShareOfTree = 500;

// A node with one child of the same size says what the child says, but for the root.
void prune(OwnerNode& node, int64_t least) {
  OwnerNode others{.name = "others"};
  std::erase_if(node.children, [&](const OwnerNode& child) {
    if (child.bytes >= least) return false;
    others.bytes += child.bytes;
    others.blocks += child.blocks;
    return true;
  });
  std::ranges::stable_sort(node.children, std::greater{}, &OwnerNode::bytes);
  for (OwnerNode& child : node.children) prune(child, least);
  if (others.bytes > 0 && !node.children.empty()) node.children.push_back(std::move(others));
}

}  // namespace

OwnerTree::Growing& OwnerTree::Growing::child(const std::string& name) {
  const auto [place, fresh] = by_name.try_emplace(name, children.size());
  if (fresh) children.push_back({.node = {.name = name}});
  return children[place->second];
}

OwnerNode OwnerTree::Growing::finish() && {
  for (Growing& child : children) node.children.push_back(std::move(child).finish());
  return std::move(node);
}

void OwnerTree::add(std::span<const std::string> path, int64_t bytes, int64_t blocks) {
  Growing* at = &root_;
  at->node.bytes += bytes;
  at->node.blocks += blocks;
  for (const std::string& name : path) {
    if (name.empty()) continue;
    at = &at->child(name);
    at->node.bytes += bytes;
    at->node.blocks += blocks;
  }
}

OwnerNode OwnerTree::finish() && {
  OwnerNode tree = std::move(root_).finish();
  prune(tree, std::max<int64_t>(1, tree.bytes / kLeastShareOfTree));
  return tree;
}

std::vector<std::string> path_of(const LiveBlock& block) {
  std::vector<std::string> path = {std::string(name_of(block.category))};
  const std::string folded = fold_indices(block.name.empty() ? block.made.module : block.name);
  for (size_t begin = 0; begin < folded.size();) {
    size_t end = std::min(folded.find('.', begin), folded.size());
    if (folded.compare(end, 2, ".*") == 0) end = std::min(end + 2, folded.size());  // "layers.*" is one thing
    path.push_back(folded.substr(begin, end - begin));
    begin = end + 1;
  }
  const Where& made = block.made;
  path.emplace_back(made.op.empty() ? made.node : made.op);
  path.push_back(short_source(made.inner_source.empty() ? made.source : made.inner_source));
  if (path.size() > 2 && path[path.size() - 1].empty() && !block.shape.empty()) path.emplace_back(block.shape);
  return path;
}

}  // namespace oomdiag
