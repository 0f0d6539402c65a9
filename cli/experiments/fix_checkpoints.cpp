#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cli/experiments/fix.h"
#include "profiler/explain/what_if.h"

// Which blocks to run again in backward: those that keep most for each op that runs again, as many as are needed.

namespace oomdiag {
namespace {

double worth(const Look::Block& block) {
  const int64_t work = block.ops > 0 ? block.ops : block.leaves;
  return static_cast<double>(block.saved_bytes) / static_cast<double>(std::max<int64_t>(1, work));
}

/// Of look.blocks, the most worth first; the first of those that are worth the same.
std::vector<std::size_t> by_worth(const Look& look) {
  std::vector<std::size_t> order(look.blocks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return worth(look.blocks[a]) > worth(look.blocks[b]); });
  return order;
}

/// "layer1.*, layer2.*", of more than two the first and the last.
std::string name_containers(const std::vector<Look::Block>& blocks) {
  std::vector<std::string> names;
  for (const Look::Block& block : blocks) {
    if (names.empty() || names.back() != block.container) names.push_back(block.container);
  }
  if (names.size() == 1) return names.front() + ".*";
  return fmt::format("{}.*{}{}.*", names.front(), names.size() == 2 ? ", " : " ... ", names.back());
}

}  // namespace

void weigh_blocks(Look& look, const Report& whole) {
  if (whole.main_device >= whole.devices.size()) return;
  for (const ReportSavedTensor& tensor : whole.devices[whole.main_device].saved_tensors) {
    for (Look::Block& block : look.blocks) {
      const bool keeps = std::any_of(tensor.saved_by_modules.begin(), tensor.saved_by_modules.end(),
                                     [&](const std::string& module) { return is_inside(module, block.path); });
      if (keeps) block.saved_bytes += tensor.bytes;
    }
  }
}

Change checkpoint_blocks(const Look& look, std::size_t count) {
  std::vector<std::size_t> chosen = by_worth(look);
  chosen.resize(std::min(count, chosen.size()));
  std::sort(chosen.begin(), chosen.end());
  Change change{.id = "checkpoint", .group = "checkpoint", .label = "", .cost = kForwardAgain};
  change.settings = {{"blocks", nlohmann::json::array()}};
  int64_t leaves = 0, ops = 0;
  bool all_seen = true;
  for (const std::size_t i : chosen) {
    change.settings["blocks"].push_back(look.blocks[i].path);
    leaves += look.blocks[i].leaves;
    ops += look.blocks[i].ops;
    all_seen &= look.blocks[i].ops > 0;
  }
  change.label = chosen.size() == look.blocks.size()
                     ? "checkpoint " + name_containers(look.blocks)
                     : fmt::format("checkpoint {} of {} blocks", chosen.size(), look.blocks.size());
  if (look.leaves > 0) change.extra_forward = static_cast<double>(leaves) / static_cast<double>(look.leaves);
  if (all_seen) change.recomputed_ops = ops;
  return change;
}

std::size_t fewest_checkpoints(const Look& look, int64_t before, int64_t reserved, int64_t room) {
  const std::vector<std::size_t> order = by_worth(look);
  if (reserved >= before || before <= room) return order.size();
  const auto kept = [&](std::size_t i) {
    return static_cast<double>(std::max<int64_t>(1, look.blocks[i].saved_bytes));
  };
  double all = 0, saved = 0;
  for (const std::size_t i : order) all += kept(i);
  const double needed = all * static_cast<double>(before - room) / static_cast<double>(before - reserved);
  std::size_t count = 0;
  while (count < order.size() && saved <= needed) saved += kept(order[count++]);
  return count;
}

}  // namespace oomdiag
