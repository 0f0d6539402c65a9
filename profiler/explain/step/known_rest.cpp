#include "profiler/explain/step/known_rest.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "profiler/explain/step/what_if.h"
#include "profiler/replay/history.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

/// One of the modules "h.0", "h.1", … that repeat.
struct Layer {
  std::string_view path{};
  std::map<std::string_view, int64_t> parameters{};  ///< bytes by the rest of their names
  bool reached = false;
  std::vector<StepAllocation> kept{};  ///< what it made and still holds, in order
};

/// Layers by their numbers.
using Stack = std::map<uint32_t, Layer>;

// "h.3.mlp.weight" belongs to layer 3 of the stack "h". Only the outermost number counts: what repeats inside of a layer is
// called as often as the layer is.
void add_parameter(std::map<std::string_view, Stack>& stacks, const LiveBlock& block) {
  size_t begin = 0;
  while (begin < block.name.size()) {
    const size_t end = std::min(block.name.find('.', begin), block.name.size());
    const std::optional<int64_t> number = parse_whole_number(block.name.substr(begin, end - begin));
    if (begin > 0 && end < block.name.size() && number) {
      Layer& layer = stacks[block.name.substr(0, begin - 1)][static_cast<uint32_t>(*number)];
      layer.path = block.name.substr(0, end);
      layer.parameters[block.name.substr(end)] = block.bytes;
      return;
    }
    begin = end + 1;
  }
}

bool is_kept(const StepAllocation& block) {
  return block.is_of_step() && block.died == StepAllocation::kNever && block.phase == Phase::forward &&
         block.category != Category::workspace && block.category != Category::temporary;
}

void fill(Stack& stack, const Allocations& blocks) {
  for (const StepAllocation& block : blocks) {
    if (!block.is_of_step() || block.phase != Phase::forward) continue;
    for (auto& [number, layer] : stack) {
      if (!is_inside(block.made.module, layer.path)) continue;
      layer.reached = true;
      if (is_kept(block)) layer.kept.push_back(block);
    }
  }
}

/// What `model`, a layer that was called, keeps, as `layer` will keep it.
StepAllocation renamed(StepAllocation block, const Layer& model, const Layer& layer, const Layer* next) {
  block.made.module = layer.path;
  std::vector<Where> savers(block.saved_by.begin(), block.saved_by.end());
  for (Where& saver : savers) {
    const bool own = is_inside(saver.module, model.path);
    if (own || next != nullptr) saver.module = own ? layer.path : next->path;
  }
  block.saved_by = std::move(savers);
  return block;
}

/// Adds what the layers after the last one that was called will keep, each like the nearest one before it with the same
/// parameters. The last one itself may not have returned: what it lacks of its model is still to come.
void add_layers(const Stack& stack, uint32_t& position, Allocations& blocks) {
  const auto last = std::find_if(stack.rbegin(), stack.rend(), [](const auto& one) { return one.second.reached; });
  if (last == stack.rend()) return;
  for (auto at = stack.find(last->first); at != stack.end(); ++at) {
    const Layer& layer = at->second;
    const Layer* model = nullptr;
    for (auto before = stack.begin(); before->first < last->first; ++before) {
      if (before->second.reached && before->second.parameters == layer.parameters) model = &before->second;
    }
    if (model == nullptr) continue;
    const auto next = std::next(at);
    for (size_t b = layer.kept.size(); b < model->kept.size(); ++b) {
      blocks.push_back(renamed(model->kept[b], *model, layer, next == stack.end() ? nullptr : &next->second));
      blocks.back().born = ++position;
    }
  }
}

int64_t count_modules_to_come(const MemoryState& state, const Allocations& blocks) {
  std::set<std::string_view> called;
  for (const StepAllocation& block : blocks) {
    if (block.is_of_step()) called.insert(block.made.module);
  }
  std::set<std::string_view> to_come;
  for (const LiveBlock& block : state.blocks) {
    const size_t dot = block.name.rfind('.');
    if (block.category != Category::parameter || dot == block.name.npos) continue;
    if (!called.contains(block.name.substr(0, dot))) to_come.insert(block.name.substr(0, dot));
  }
  return static_cast<int64_t>(to_come.size());
}

/// The parameters that this step will give a gradient and state. Of several models of one structure (folds of a
/// cross-validation, a cell that was run again) one is trained. Once backward has begun, a model that was not called gets none.
std::vector<const LiveBlock*> list_trained(const MemoryState& state, const Allocations& step) {
  std::set<std::string_view> called;
  for (const StepAllocation& block : step) {
    if (block.is_of_step() && !block.made.module.empty()) called.insert(block.made.module);
  }
  const auto took_part = [&](std::string_view name) {
    const std::string_view module = name.substr(0, std::min(name.rfind('.'), name.size()));
    return std::any_of(called.begin(), called.end(), [&](std::string_view one) {
      return is_inside(module, one) || is_inside(one, module) || one.find('.') == one.npos;
    });
  };
  const bool all_called = state.phase != Phase::setup && state.phase != Phase::forward;
  std::set<std::pair<std::string_view, int64_t>> seen;
  std::vector<const LiveBlock*> trained;
  for (const LiveBlock& block : state.blocks) {
    if (block.category != Category::parameter || !block.trained) continue;
    if (!block.name.empty() && !seen.insert({block.name, block.bytes}).second) continue;
    if (all_called && !called.empty() && block.name.find('.') != block.name.npos && !took_part(block.name)) continue;
    trained.push_back(&block);
  }
  return trained;
}

// A gradient of each parameter that does not have one yet, one after the other.
void add_gradients(const std::vector<const LiveBlock*>& trained, uint32_t& position, KnownRest& rest) {
  std::multiset<int64_t> made;
  for (const StepAllocation& block : rest.step_allocations.blocks) {
    if (block.category == Category::gradient && block.died == StepAllocation::kNever) made.insert(block.bytes);
  }
  for (const LiveBlock* block : trained) {
    if (const auto own = made.find(block->bytes); own != made.end()) {
      made.erase(own);
      continue;
    }
    rest.gradient_bytes += block->bytes;
    rest.step_allocations.blocks.push_back(
        {.bytes = block->bytes, .born = ++position, .category = Category::gradient, .phase = Phase::backward});
  }
}

void add_state(const std::vector<const LiveBlock*>& trained, uint32_t& position, KnownRest& rest) {
  double state = 0;
  for (const LiveBlock* block : trained) state += least_state(block->group) * static_cast<double>(block->bytes);
  int64_t there = 0;
  for (const StepAllocation& block : rest.step_allocations.blocks) {
    if (block.category == Category::optimizer_state && block.died == StepAllocation::kNever) there += block.bytes;
  }
  rest.state_bytes = std::max<int64_t>(0, static_cast<int64_t>(state) - there);
  if (rest.state_bytes == 0) return;
  rest.step_allocations.blocks.push_back({.bytes = rest.state_bytes,
                                          .born = ++position,
                                          .category = Category::optimizer_state,
                                          .phase = Phase::optimizer});
}

// An operator of a foreach optimizer makes its results for all parameters before it returns. Those of several groups come
// one after the other, and which one failed need not be known.
void add_temporaries(const MemoryState& state, uint32_t position, Allocations& blocks) {
  if (blocks.empty() || state.phase != Phase::optimizer) return;
  const Where failed = blocks.back().made;
  if (failed.op.find("_foreach_") == failed.op.npos || blocks.back().category != Category::temporary) return;
  int64_t trained = 0, made = 0;
  std::string_view group;
  for (const LiveBlock& block : state.blocks) {
    if (block.category != Category::parameter || !block.trained) continue;
    if (!group.empty() && block.group != group) return;
    group = block.group;
    trained += block.bytes;
  }
  for (const StepAllocation& block : blocks) {
    const bool alike = block.made.op == failed.op && block.category == Category::temporary;
    made += alike && block.died == StepAllocation::kNever ? block.bytes : 0;
  }
  if (trained <= made) return;
  StepAllocation rest{
      .bytes = trained - made, .born = position, .category = Category::temporary, .phase = Phase::optimizer};
  rest.made = failed;
  blocks.push_back(rest);
}

// Where the graph is seen, what none of its nodes keeps may be gone as soon as the call that made it returns: a sum on its
// way into a norm, the input of the op whose request failed.
void end_unsaved(Allocations& blocks, uint32_t position) {
  const bool graph_seen = std::any_of(blocks.begin(), blocks.end(), [](const StepAllocation& block) {
    return is_kept(block) && !block.saved_by.empty();
  });
  if (!graph_seen) return;
  for (StepAllocation& block : blocks) {
    if (is_kept(block) && block.saved_by.empty() && !block.ever_saved) block.died = position;
  }
}

// What forward and backward made is gone when the optimizer begins.
void end_step(Allocations& blocks, uint32_t position) {
  for (StepAllocation& block : blocks) {
    const bool ends = block.died == StepAllocation::kNever && !traits_of(block.category).stays;
    if (ends && block.category != Category::gradient) block.died = position;
  }
}

// How large a workspace cuDNN takes in a changed step is not known.
void forget_workspaces(Allocations& blocks) {
  std::erase_if(blocks, [](const StepAllocation& block) {
    return block.category == Category::workspace && workspace_follows_batch(block.made);
  });
}

}  // namespace

double least_state(std::string_view group) {
  struct Known {
    std::string_view optimizer;
    double state;
  };
  // torch/optim; exp_avg and exp_avg_sq are made like the parameter. Of others it is not known, and options may add to these.
  constexpr std::array<Known, 9> kKnown = {{{"Adam", 2},
                                            {"AdamW", 2},
                                            {"NAdam", 2},
                                            {"RAdam", 2},
                                            {"Adamax", 2},
                                            {"Adadelta", 2},
                                            {"Adagrad", 1},
                                            {"RMSprop", 1},
                                            {"Rprop", 2}}};
  const std::string_view name = group.substr(0, group.find_first_of(", "));
  const auto known = std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& k) { return k.optimizer == name; });
  return known == kKnown.end() ? 0 : known->state;
}

KnownRest add_known_rest(const StepAllocations& cut, const MemoryState& state) {
  KnownRest rest{.step_allocations = cut};
  uint32_t position = 0;
  for (const StepAllocation& block : cut.blocks) {
    position = std::max(position, block.born);
    if (block.died != StepAllocation::kNever) position = std::max(position, block.died);
  }
  if (state.phase == Phase::forward) {
    end_unsaved(rest.step_allocations.blocks, ++position);
    std::map<std::string_view, Stack> stacks;
    for (const LiveBlock& block : state.blocks) {
      if (block.category == Category::parameter) add_parameter(stacks, block);
    }
    for (auto& [path, stack] : stacks) {
      fill(stack, cut.blocks);
      add_layers(stack, position, rest.step_allocations.blocks);
    }
    rest.modules_to_come = count_modules_to_come(state, cut.blocks);
  }
  add_temporaries(state, position, rest.step_allocations.blocks);
  forget_workspaces(rest.step_allocations.blocks);
  rest.forward_end = ++position;
  position += 2 * static_cast<uint32_t>(rest.step_allocations.blocks.size()) + 2;  // room for a backward pass
  end_step(rest.step_allocations.blocks, position);
  const std::vector<const LiveBlock*> trained = list_trained(state, cut.blocks);
  add_gradients(trained, position, rest);
  add_state(trained, position, rest);
  return rest;
}

}  // namespace oomdiag
