#include "profiler/explain/fix_rules.h"

#include <algorithm>

#include "profiler/explain/shape.h"
#include "profiler/explain/simulate_fits.h"
#include "profiler/explain/step_model.h"
#include "profiler/explain/what_if.h"
#include "profiler/replay/history.h"

namespace oomdiag {
namespace {

bool is_scratch(const StepAllocation& block) {
  return block.category == Category::workspace || block.category == Category::temporary;
}

// "2" of "2.0.conv" beside "1.relu": the outermost module around the one but not around the other.
std::string_view beside(std::string_view module, std::string_view other) {
  const auto differs = std::mismatch(module.begin(), module.end(), other.begin(), other.end()).first;
  return module.substr(0, module.find('.', static_cast<size_t>(differs - module.begin())));
}

bool fits_with(const StepModel& model, int64_t batch, int64_t own) {
  const Allocations& blocks = model.blocks;
  const Allocations scaled = scale_batch(blocks, batch, own);
  const int64_t available = model.available_bytes - model.private_pool_cached_bytes;
  if (model.peak_bytes - find_peak(blocks) + find_peak(scaled) > available) return false;
  return !model.whole || simulate_fits_with_margin(scaled, available, model.settings);
}

/// The largest batch between one that `fits` and one that `fails`; `own` is that of the step.
int64_t bisect_batch(const StepModel& model, int64_t own, int64_t fits, int64_t fails) {
  while (fails - fits > 1) {
    const int64_t middle = fits + (fails - fits) / 2;
    (fits_with(model, middle, own) ? fits : fails) = middle;
  }
  return fits;
}

// Of [1, 32768, 4096] there is no half. Where no shape is known, there may be.
bool has_batch_of_one(const Allocations& blocks) {
  int64_t one = 0, all = 0;
  for (const StepAllocation& block : blocks) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    const bool is_data = block.category == Category::activation || block.category == Category::input ||
                         block.category == Category::output;
    if (shape.size() < 2 || !is_data) continue;
    all += block.bytes;
    one += shape.front() == 1 ? block.bytes : 0;
  }
  return one * 2 > all;
}

const char* cost_of_fewer(const StepModel& model) {
  return may_train(model) ? "fewer examples a step: more steps, another learning rate" : "fewer examples at a time";
}

}  // namespace

std::string short_place(const Where& made) {
  const std::string_view line = made.source.substr(made.source.rfind('/') + 1);
  return std::string(line.empty() ? (made.module.empty() ? made.op : made.module) : line);
}

// For larger shapes libraries take workspaces that the run had none of, and other holes are left: of 45 claims that bytes and blocks
// alone made, those of 90 times a batch of 2 ran out (tests/integration/test_batch_line.py).
int64_t keep_room_for_libraries(int64_t batch, int64_t largest) {
  constexpr int64_t kFar = 2, kKept = 10;  // times the batch; a tenth of what is added
  constexpr int64_t kFew = 16;             // samples, which say no more than as many times their number
  if (largest <= kFar * batch) return largest;
  const int64_t kept = largest - (largest - batch + kKept - 1) / kKept;
  return batch < kFew ? std::min(kFew * batch, kept) : kept;
}

int64_t find_largest_batch(const StepModel& model, int64_t batch, int64_t at_most) {
  if (model.blocks.size() > kMaxSimulated) return 0;
  if (!fits_with(model, batch, batch)) {
    return model.peak_bytes > model.available_bytes ? bisect_batch(model, batch, 0, batch) : batch;
  }
  return at_most <= batch ? batch : keep_room_for_libraries(batch, bisect_batch(model, batch, batch, at_most + 1));
}

bool trains(const StepModel& model) {
  const Allocations& blocks = model.blocks;
  if (model.has_backward || model.only_infers) return model.has_backward;
  return std::any_of(blocks.begin(), blocks.end(), [](const StepAllocation& block) {
    return block.category == Category::activation || block.category == Category::gradient;
  });
}

bool is_without_backward(const StepModel& model) {
  return model.whole && find_backward(model.blocks) == StepAllocation::kNever;
}

bool may_train(const StepModel& model) { return trains(model) || (!model.whole && !model.only_infers); }

/// Expandable segments, for fragmentation: the same bytes are allocated, and hardly any free blocks are between them.
std::optional<ModifiedStep> use_expandable_segments(const StepModel& model) {
  if (!model.is_fragmented || model.settings.expandable_segments) return {};
  AllocatorSettings settings = model.settings;
  settings.expandable_segments = true;
  return ModifiedStep{.blocks = model.blocks, .settings = settings};
}

/// peak(b/2): what follows the batch takes half its bytes (follows_batch); parameters, their gradients, optimizer state
/// and the workspaces of matrix products stay.
std::optional<ModifiedStep> halve_batch(const StepModel& model) {
  if (model.batch || has_batch_of_one(model.blocks)) return {};  // fit_batch says more
  return ModifiedStep{.blocks = scale_batch(model.blocks, 1, 2), .costs = cost_of_fewer(model)};
}

/// The largest b with peak(b) ≤ available_bytes, by bisection over the same model.
std::optional<ModifiedStep> fit_batch(const StepModel& model) {
  if (!model.batch || *model.batch <= 1 || fits_with(model, *model.batch, *model.batch)) return {};
  const int64_t fits = bisect_batch(model, *model.batch, 0, *model.batch);
  if (fits == 0) return {};
  return ModifiedStep{.blocks = scale_batch(model.blocks, fits, *model.batch),
                      .variant = std::to_string(fits),
                      .label = "batch " + std::to_string(fits) + (model.whole ? "" : " or less"),
                      .costs = cost_of_fewer(model)};
}

/// Two micro-batches of half the size, one optimizer step: peak(b/2), but from the second one on gradients live through
/// forward, and each new one stands beside the old one until it is added.
std::optional<ModifiedStep> accumulate(const StepModel& model) {
  if (!trains(model) || is_without_backward(model) || model.batch == 1 || has_batch_of_one(model.blocks)) return {};
  Allocations blocks = scale_batch(model.blocks, 1, 2);
  Allocations added;
  for (StepAllocation& block : blocks) {
    if (block.category != Category::gradient || !block.is_of_step()) continue;
    added.push_back(block);
    added.back().died = block.born + 1;
    block.born = StepAllocation::kBefore;
  }
  blocks.insert(blocks.end(), added.begin(), added.end());
  return ModifiedStep{.blocks = std::move(blocks), .variant = "2"};
}

/// ReLU in place: where its input is kept by nobody else, it becomes the output, so the block is allocated once.
std::optional<ModifiedStep> use_relu_in_place(const StepModel& model) {
  Allocations blocks = model.blocks;
  bool any = false;
  for (size_t r = 1; r < blocks.size(); ++r) {
    StepAllocation& result = blocks[r];
    if (result.made.op != "aten::relu" || result.phase != Phase::forward) continue;
    for (size_t i = r; i-- > 0 && blocks[i].born + 16 > result.born;) {
      StepAllocation& input = blocks[i];
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
  return ModifiedStep{.blocks = std::move(blocks)};
}

/// no_grad: nothing is saved. (Under no_grad too autocast makes the casts of weights that it keeps with a graph.) A tensor dies when the module beside its own that takes it has returned: a caller holds what
/// it hands in. What an op needs for itself, as a workspace, takes nothing. Where tensors skip over modules (residuals) the
/// true peak is higher by them.
std::optional<ModifiedStep> use_no_grad(const StepModel& model) {
  if (!is_without_backward(model) || model.has_backward) return {};
  Allocations blocks = model.blocks;
  const std::set<int64_t> parameter_sizes = list_parameter_sizes(blocks);
  std::vector<StepAllocation*> made;  // by the forward ops that autograd recorded, in order
  for (StepAllocation& block : blocks) {
    const bool recorded = block.in_graph && block.is_of_step() && !is_weight_cast(block, parameter_sizes);
    if (recorded) made.push_back(&block);
  }
  for (size_t m = 0; m + 1 < made.size(); ++m) {
    size_t last = m + 1;
    while (last + 1 < made.size() && is_scratch(*made[last])) ++last;
    const std::string_view taker = beside(made[last]->made.module, made[m]->made.module);
    while (last + 1 < made.size() && is_inside(made[last + 1]->made.module, taker)) ++last;
    made[m]->died = std::min(made[m]->died, made[last]->born + 1);
  }
  if (made.empty()) return {};
  return ModifiedStep{.blocks = std::move(blocks)};
}

/// Outputs that the program holds through backward though autograd does not need them: freed before backward begins.
std::optional<ModifiedStep> drop_outputs(const StepModel& model) {
  Allocations blocks = model.blocks;
  const uint32_t backward = find_backward(blocks);
  if (backward == StepAllocation::kNever) return {};
  const uint32_t last = find_last_backward(blocks);
  int64_t largest = 0;
  std::string made_at;
  for (StepAllocation& block : blocks) {
    const bool held = block.category == Category::output && block.phase == Phase::forward && !block.freed_in_backward &&
                      block.is_of_step() && block.born < backward && block.died > backward;
    const bool leaks = model.grown_bytes > 0 && block.died > last;  // stop_growth is about these
    if (!held || leaks) continue;
    block.died = backward;
    if (block.bytes > largest) made_at = short_place(block.made);
    largest = std::max(largest, block.bytes);
  }
  if (largest == 0) return {};
  return ModifiedStep{.blocks = std::move(blocks),
                      .lines = {"del outputs  # made at " + made_at + ", before loss.backward()"}};
}

/// Without what grew from step to step: one block of that size less, all the time.
std::optional<ModifiedStep> stop_growth(const StepModel& model) {
  if (model.grown_bytes <= 0) return {};
  Allocations blocks = model.blocks;
  blocks.push_back({.bytes = -model.grown_bytes});
  ModifiedStep step{.blocks = std::move(blocks)};
  if (model.growing_place.empty()) return step;
  step.label = "stop keeping tensors across steps (" + model.growing_place + ")";
  step.lines = {"# keep numbers in place of tensors of " + model.growing_place + ": .item(), or .detach().cpu()"};
  return step;
}

}  // namespace oomdiag
