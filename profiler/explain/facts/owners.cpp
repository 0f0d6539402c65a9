#include "profiler/explain/facts/owners.h"

#include <algorithm>
#include <map>

#include "profiler/replay/history.h"

namespace oomdiag {
namespace {

using SumsByName = std::map<std::string_view, OwnedBytes>;

void count(SumsByName& sums, std::string_view name, const LiveBlock& block) {
  OwnedBytes& sum = sums[name];
  sum.bytes += block.bytes;
  ++sum.blocks;
}

std::vector<OwnedBytes> by_size(const SumsByName& sums) {
  std::vector<OwnedBytes> list;
  for (const auto& [name, sum] : sums) {
    list.push_back(sum);
    list.back().name = name;
  }
  std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  if (list.size() <= kMaxOwned) return list;
  OwnedBytes others{.name = "others"};
  for (size_t i = kMaxOwned - 1; i < list.size(); ++i) {
    others.bytes += list[i].bytes;
    others.blocks += list[i].blocks;
  }
  list.resize(kMaxOwned - 1);
  list.push_back(std::move(others));
  return list;
}

// "layer3.5.conv2" of the parameter "layer3.5.conv2.weight".
std::string_view module_of(const LiveBlock& block) {
  if (block.name.empty()) return block.made.module;
  const size_t dot = block.name.rfind('.');
  return dot == block.name.npos ? std::string_view() : block.name.substr(0, dot);
}

void count_modules(SumsByName& sums, const LiveBlock& block) {
  const std::string_view path = module_of(block);
  if (path.empty()) return count(sums, path, block);
  for (size_t dot = path.find('.'); dot != path.npos; dot = path.find('.', dot + 1)) {
    count(sums, path.substr(0, dot), block);
  }
  count(sums, path, block);
}

Keeper keeper_of(const LiveBlock& block) {
  switch (block.category) {
    case Category::parameter:
    case Category::buffer:
    case Category::gradient:
      return Keeper::module;
    case Category::optimizer_state:
      return Keeper::optimizer;
    case Category::activation:
      return Keeper::autograd;
    case Category::activation_gradient:
    case Category::temporary:
      return Keeper::operation;
    case Category::workspace:
      return Keeper::library;
    case Category::input:
    case Category::output:
    case Category::unknown:
      return Keeper::program;
  }
  return Keeper::program;
}

}  // namespace

Owners list_owners(const MemoryState& state) {
  SumsByName modules, ops, sources, lines, shapes;
  for (const LiveBlock& block : state.blocks) {
    if (block.pending_free) continue;
    count_modules(modules, block);
    count(ops, block.made.op.empty() ? block.made.node : block.made.op, block);
    count(sources, block.made.source, block);
    count(lines, block.made.inner_source.empty() ? block.made.source : block.made.inner_source, block);
    count(shapes, block.shape, block);
  }
  return {.module = by_size(modules),
          .op = by_size(ops),
          .source = by_size(sources),
          .shape = by_size(shapes),
          .line = by_size(lines)};
}

std::optional<Lifetime> follow_largest(const MemoryState& state) {
  const LiveBlock* largest = nullptr;
  for (const LiveBlock& block : state.blocks) {
    if (!block.pending_free && (largest == nullptr || block.bytes > largest->bytes)) largest = &block;
  }
  if (largest == nullptr) return std::nullopt;
  Lifetime life{.block = *largest, .kept_by = keeper_of(*largest)};
  if (life.kept_by == Keeper::autograd && !largest->saved_by.empty()) life.freed_by = largest->saved_by.front();
  return life;
}

}  // namespace oomdiag
