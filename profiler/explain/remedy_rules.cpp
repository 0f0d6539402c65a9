#include "profiler/explain/remedy_rules.h"

#include <algorithm>
#include <map>

#include "profiler/explain/arena.h"

// One function per remedy: it changes the lives of the step's blocks as the remedy would. `formula` says the same in words.

namespace oomdiag {
namespace {

std::string short_place(const Where& made) {
  const std::string_view line = made.source.substr(made.source.rfind('/') + 1);
  return std::string(line.empty() ? (made.module.empty() ? made.op : made.module) : line);
}

bool is_scratch(const BlockLife& block) {
  return block.category == Category::workspace || block.category == Category::temporary;
}

// "2" of "2.0.conv" beside "1.relu": the outermost module around the one but not around the other.
std::string_view beside(std::string_view module, std::string_view other) {
  const auto differs = std::mismatch(module.begin(), module.end(), other.begin(), other.end()).first;
  return module.substr(0, module.find('.', static_cast<size_t>(differs - module.begin())));
}

bool fits_with(const Situation& situation, int64_t batch) {
  const Lives& blocks = situation.lives.blocks;
  const Lives scaled = scale_batch(blocks, batch, *situation.batch);
  const int64_t room = situation.room_bytes - situation.private_pool_cached_bytes;
  if (situation.peak_bytes - find_peak(blocks) + find_peak(scaled) > room) return false;
  return !situation.whole || fits_safely(scaled, room, situation.settings);
}

const char* cost_of_fewer(const Situation& situation) {
  return may_train(situation) ? "fewer examples a step: more steps, another learning rate" : "fewer examples at a time";
}

}  // namespace

bool trains(const Situation& situation) {
  const Lives& blocks = situation.lives.blocks;
  return situation.has_backward || std::any_of(blocks.begin(), blocks.end(), [](const BlockLife& block) {
           return block.category == Category::activation || block.category == Category::gradient;
         });
}

bool may_train(const Situation& situation) { return trains(situation) || !situation.whole; }

/// peak(b/2): what follows the batch takes half its bytes (follows_batch); parameters, their gradients, optimizer state
/// and the workspaces of matrix products stay.
std::optional<Changed> halve_batch(const Situation& situation) {
  if (situation.batch) return {};  // fit_batch says more
  return Changed{.id = "half_batch",
                 .label = "half the batch",
                 .formula = "peak over the step of fixed + scaling/2",
                 .blocks = scale_batch(situation.lives.blocks, 1, 2),
                 .costs = cost_of_fewer(situation),
                 .changes_training = may_train(situation)};
}

/// The largest b with peak(b) ≤ room, by bisection over the same model.
std::optional<Changed> fit_batch(const Situation& situation) {
  if (!situation.batch || *situation.batch <= 1 || fits_with(situation, *situation.batch)) return {};
  int64_t fits = 0, fails = *situation.batch;
  while (fails - fits > 1) {
    const int64_t middle = fits + (fails - fits) / 2;
    (fits_with(situation, middle) ? fits : fails) = middle;
  }
  if (fits == 0) return {};
  return Changed{.id = "batch_" + std::to_string(fits),
                 .label = "batch " + std::to_string(fits) + (situation.whole ? "" : " or less"),
                 .formula = "largest b with peak over the step of fixed + scaling ∙ b/batch ≤ room",
                 .blocks = scale_batch(situation.lives.blocks, fits, *situation.batch),
                 .costs = cost_of_fewer(situation),
                 .changes_training = may_train(situation)};
}

/// Two micro-batches of half the size, one optimizer step: peak(b/2), but from the second one on gradients live through
/// forward, and each new one stands beside the old one until it is added.
std::optional<Changed> accumulate(const Situation& situation) {
  if (!trains(situation)) return {};
  Lives blocks = scale_batch(situation.lives.blocks, 1, 2);
  Lives added;
  for (BlockLife& block : blocks) {
    if (block.category != Category::gradient || !block.is_of_step()) continue;
    added.push_back(block);
    added.back().died = block.born + 1;
    block.born = BlockLife::kBefore;
  }
  blocks.insert(blocks.end(), added.begin(), added.end());
  return Changed{.id = "accumulate_2",
                 .label = "2 micro-batches, accumulated",
                 .formula = "peak over the step of fixed + scaling/2, gradients alive all the time",
                 .blocks = std::move(blocks),
                 .how = {"for x, y in zip(inputs.chunk(2), labels.chunk(2)):",
                         "    (loss_of(model(x), y) / 2).backward()", "optimizer.step(); optimizer.zero_grad()"},
                 .costs = "two passes per step of half the size; batch norms see half the batch"};
}

/// ReLU in place: where its input is kept by nobody else, it becomes the output, so the block is allocated once.
std::optional<Changed> use_relu_in_place(const Situation& situation) {
  Lives blocks = situation.lives.blocks;
  bool any = false;
  for (size_t r = 1; r < blocks.size(); ++r) {
    BlockLife& result = blocks[r];
    if (result.made.op != "aten::relu" || result.phase != Phase::forward) continue;
    for (size_t i = r; i-- > 0 && blocks[i].born + 16 > result.born;) {
      BlockLife& input = blocks[i];
      const bool fits = input.bytes == result.bytes && input.phase == Phase::forward && input.saved_by.empty() &&
                        input.category != Category::activation && input.is_of_step() && input.died > result.born;
      if (!fits) continue;
      input.died = result.died;
      result.bytes = 0;
      any = true;
      break;
    }
  }
  if (!any) return {};
  return Changed{.id = "relu_in_place",
                 .label = "ReLU in place",
                 .formula = "a ReLU whose input nobody keeps writes into it: one block in place of two",
                 .blocks = std::move(blocks),
                 .how = {"torch.nn.ReLU(inplace=True)"}};
}

/// no_grad: nothing is saved. A tensor dies when the module beside its own that takes it has returned: a caller holds what
/// it hands in. What an op needs for itself, as a workspace, takes nothing. Where tensors skip over modules (residuals) the
/// true peak is higher by them.
std::optional<Changed> use_no_grad(const Situation& situation) {
  if (!situation.whole || situation.has_backward)
    return {};  // an OOM in forward does not tell that no backward follows
  if (find_backward(situation.lives.blocks) != BlockLife::kNever) return {};
  Lives blocks = situation.lives.blocks;
  std::vector<BlockLife*> made;  // by the forward ops that autograd recorded, in order
  for (BlockLife& block : blocks) {
    if (block.in_graph && block.is_of_step()) made.push_back(&block);
  }
  for (size_t m = 0; m + 1 < made.size(); ++m) {
    size_t last = m + 1;
    while (last + 1 < made.size() && is_scratch(*made[last])) ++last;
    const std::string_view taker = beside(made[last]->made.module, made[m]->made.module);
    while (last + 1 < made.size() && is_inside(made[last + 1]->made.module, taker)) ++last;
    made[m]->died = std::min(made[m]->died, made[last]->born + 1);
  }
  if (made.empty()) return {};
  return Changed{.id = "no_grad",
                 .label = "torch.no_grad(), as nothing runs backward",
                 .formula = "a tensor dies when the module that takes it returns",
                 .blocks = std::move(blocks),
                 .how = {"with torch.no_grad():"}};
}

/// Outputs that the program holds through backward though autograd does not need them: freed before backward begins.
std::optional<Changed> drop_outputs(const Situation& situation) {
  Lives blocks = situation.lives.blocks;
  const uint32_t backward = find_backward(blocks);
  if (backward == BlockLife::kNever) return {};
  const uint32_t last = find_last_backward(blocks);
  int64_t largest = 0;
  std::string made_at;
  for (BlockLife& block : blocks) {
    const bool held = block.category == Category::output && block.phase == Phase::forward && !block.freed_in_backward &&
                      block.is_of_step() && block.born < backward && block.died > backward;
    const bool leaks = situation.grown_bytes > 0 && block.died > last;  // stop_growth is about these
    if (!held || leaks) continue;
    block.died = backward;
    if (block.bytes > largest) made_at = short_place(block.made);
    largest = std::max(largest, block.bytes);
  }
  if (largest == 0) return {};
  return Changed{.id = "drop_outputs",
                 .label = "del outputs before backward",
                 .formula = "outputs that autograd does not keep end where backward begins",
                 .blocks = std::move(blocks),
                 .how = {"del outputs  # made at " + made_at + ", before loss.backward()"}};
}

/// Without what grew from step to step: one block of that size less, all the time.
std::optional<Changed> stop_growth(const Situation& situation) {
  if (situation.grown_bytes <= 0) return {};
  Lives blocks = situation.lives.blocks;
  blocks.push_back({.bytes = -situation.grown_bytes});
  return Changed{.id = "stop_growth",
                 .label = "keep nothing from step to step",
                 .formula = "peak − bytes grown since the first step",
                 .blocks = std::move(blocks)};
}

}  // namespace oomdiag
