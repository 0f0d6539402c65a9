#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cli/experiments/fix.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/report/report.h"

// Which blocks to run again in backward: those that keep most for each op that runs again, as many as are needed.

namespace oomdiag {
namespace {

double worth(const ProgramProfile::Block& block) {
  const int64_t work = block.ops > 0 ? block.ops : block.leaves;
  return static_cast<double>(block.saved_bytes) / static_cast<double>(std::max<int64_t>(1, work));
}

/// Of profile.blocks, the most worth first; the first of those that are worth the same.
std::vector<std::size_t> by_worth(const ProgramProfile& profile) {
  std::vector<std::size_t> order(profile.blocks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return worth(profile.blocks[a]) > worth(profile.blocks[b]); });
  return order;
}

/// "layer1.*"; of the model itself, which has no name, "*".
std::string all_of(const std::string& container) { return container.empty() ? "*" : container + ".*"; }

/// "layer1.*, layer2.*", of more than two the first and the last.
std::string name_containers(const std::vector<ProgramProfile::Block>& blocks) {
  std::vector<std::string> names;
  for (const ProgramProfile::Block& block : blocks) {
    if (names.empty() || names.back() != block.container) names.push_back(block.container);
  }
  if (names.size() == 1) return all_of(names.front());
  return fmt::format("{}{}{}", all_of(names.front()), names.size() == 2 ? ", " : " ... ", all_of(names.back()));
}

}  // namespace

void weigh_blocks(ProgramProfile& profile, const Report& whole) {
  const ReportOfDevice* const device = main_device_of(whole);
  if (device == nullptr) return;
  for (const ReportSavedTensor& tensor : device->saved_tensors) {
    for (ProgramProfile::Block& block : profile.blocks) {
      const bool keeps = std::any_of(tensor.saved_by_modules.begin(), tensor.saved_by_modules.end(),
                                     [&](const std::string& module) { return is_inside(module, block.path); });
      if (keeps) block.saved_bytes += tensor.bytes;
    }
  }
}

Change checkpoint_blocks(const ProgramProfile& profile, std::size_t count) {
  std::vector<std::size_t> chosen = by_worth(profile);
  chosen.resize(std::min(count, chosen.size()));
  return checkpoint_chosen(profile, std::move(chosen));
}

Change checkpoint_chosen(const ProgramProfile& profile, std::vector<std::size_t> chosen) {
  std::sort(chosen.begin(), chosen.end());
  Change change = change_of("checkpoint");
  change.settings = {{"blocks", nlohmann::json::array()}};
  int64_t leaves = 0, ops = 0;
  bool all_seen = true;
  for (const std::size_t i : chosen) {
    change.settings["blocks"].push_back(profile.blocks[i].path);
    leaves += profile.blocks[i].leaves;
    ops += profile.blocks[i].ops;
    all_seen &= profile.blocks[i].ops > 0;
  }
  change.label = chosen.size() == profile.blocks.size()
                     ? "checkpoint " + name_containers(profile.blocks)
                     : fmt::format("checkpoint {} of {} blocks", chosen.size(), profile.blocks.size());
  if (profile.leaves > 0) change.extra_forward = static_cast<double>(leaves) / static_cast<double>(profile.leaves);
  if (all_seen) change.recomputed_ops = ops;
  return change;
}

Change offload_chosen(const ProgramProfile& profile, const std::vector<std::size_t>& blocks,
                      const std::vector<std::size_t>& chosen) {
  Change change = change_of("offload_blocks");
  change.settings = {{"blocks", nlohmann::json::array()}, {"chosen", nlohmann::json::array()}};
  for (const std::size_t i : blocks) change.settings["blocks"].push_back(profile.blocks[i].path);
  for (const std::size_t i : chosen) change.settings["chosen"].push_back(profile.blocks[i].path);
  change.label = fmt::format("offload {} of {} blocks", chosen.size(), blocks.size());
  return change;
}

// The inputs of the parts are kept, and one part at a time is there whole: their sum is least for as many parts as a part has
// layers.
Change checkpoint_layers(const ProgramProfile& profile) {
  const auto segments = std::clamp<int64_t>(std::llround(std::sqrt(static_cast<double>(profile.layers))), 2, 16);
  Change change = change_of("checkpoint");
  change.settings = {{"sequential", profile.sequential}, {"segments", segments}};
  const std::string name = profile.sequential.empty() ? "the model" : profile.sequential;
  change.label = fmt::format("checkpoint {} in {} segments", name, segments);
  change.extra_forward =
      static_cast<double>(profile.layers) / static_cast<double>(std::max(profile.layers, profile.leaves));
  return change;
}

std::size_t fewest_checkpoints(const ProgramProfile& profile, int64_t before, int64_t reserved, int64_t available) {
  const std::vector<std::size_t> order = by_worth(profile);
  if (reserved >= before || before <= available) return order.size();
  const auto kept = [&](std::size_t i) {
    return static_cast<double>(std::max<int64_t>(1, profile.blocks[i].saved_bytes));
  };
  double all = 0, saved = 0;
  for (const std::size_t i : order) all += kept(i);
  const double needed = all * static_cast<double>(before - available) / static_cast<double>(before - reserved);
  std::size_t count = 0;
  while (count < order.size() && saved <= needed) saved += kept(order[count++]);
  return count;
}

}  // namespace oomdiag
