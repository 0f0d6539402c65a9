#include <algorithm>
#include <map>

#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/step/step_model.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/words/short_place.h"
#include "profiler/replay/history.h"

// What a step works on: how the allocator cuts memory, graphs and outputs that nobody needs, what stays from step to step, results that
// are written anew, layouts of images.

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

/// Expandable segments, for fragmentation: the same bytes are allocated, and hardly any free blocks are between them.
std::optional<ModifiedStep> use_expandable_segments(const StepModel& model) {
  if (!model.is_fragmented || model.settings.expandable_segments) return {};
  AllocatorSettings settings = model.settings;
  settings.expandable_segments = true;
  return ModifiedStep{.blocks = model.blocks, .settings = settings};
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

/// Inputs of several passes that one line makes, and the graph keeps: its variable has one at a time.
void drop_inputs_of_earlier_passes(Allocations& blocks) {
  std::map<std::string_view, StepAllocation*> latest;  // by line
  for (StepAllocation& block : blocks) {
    const bool is_input = block.category == Category::input && block.phase == Phase::forward && block.is_of_step();
    if (!is_input || block.made.source.empty()) continue;
    StepAllocation*& before = latest[block.made.source];
    if (before != nullptr && before->bytes == block.bytes) before->died = std::min(before->died, block.born + 1);
    before = &block;
  }
}

/// no_grad, also around an evaluation of a program that trains: nothing is saved. (Under no_grad too autocast makes the casts of
/// weights that it keeps with a graph.) A tensor dies when the module beside its own that takes it has returned: a caller holds
/// what it hands in. What an op needs for itself, as a workspace, takes nothing. Where tensors skip over modules (residuals) the
/// true peak is higher by them.
std::optional<ModifiedStep> use_no_grad(const StepModel& model) {
  if (!is_without_backward(model)) return {};
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
  drop_inputs_of_earlier_passes(blocks);
  ModifiedStep step{.blocks = std::move(blocks)};
  if (!model.has_backward) return step;
  const auto largest = std::ranges::max_element(made, {}, &StepAllocation::bytes);
  step.label = "torch.no_grad() around the pass that no backward follows";
  step.floor_bytes = model.other_peak_bytes;
  step.lines = {"with torch.no_grad():  # around what calls the model at " + short_place((*largest)->made)};
  return step;
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

/// Not where a graph may be needed.
std::optional<ModuleSettings> when_nothing_runs_backward(const ProgramFacts& program) {
  return unless(!program.profile.has_root || program.runs_backward);
}

std::optional<ModuleSettings> where_relus_are_trained(const ProgramFacts& program) {
  return unless(program.profile.count_modules("ReLU") == 0 || !program.runs_backward);
}

std::optional<ModuleSettings> where_images_are_convolved(const ProgramFacts& program) {
  return unless(program.profile.count_modules("Conv2d") == 0);
}

constexpr FixRow kStepFixes[] = {
    {.id = "expandable_segments",
     .label = "expandable_segments:True",
     .group = "segments",
     .formula = "the same bytes, packed into whole pages",
     .lines = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
     .needs_no_categories = true,
     .predict = use_expandable_segments},
    {.id = "stop_growth",
     .label = "stop keeping tensors across steps",
     .group = "growth",
     .formula = "peak − bytes grown since the first step",
     .cures_growth = true,
     .needs_no_categories = true,
     .predict = stop_growth},
    {.id = "no_grad",
     .label = "torch.no_grad(), as nothing runs backward",
     .group = "grad",
     .has_module = true,
     .formula = "a tensor dies when the module that takes it returns",
     .lines = "with torch.no_grad():",
     .predict = use_no_grad,
     .configure = when_nothing_runs_backward},
    {.id = "drop_outputs",
     .label = "del outputs before backward",
     .group = "outputs",
     .formula = "outputs that autograd does not keep end where backward begins",
     .predict = drop_outputs},
    {.id = "relu_in_place",
     .label = "ReLU in place",
     .group = "relu",
     .has_module = true,
     .formula = "a ReLU whose input nobody keeps writes into it: one block in place of two",
     .lines = "torch.nn.ReLU(inplace=True)",
     .combines = true,
     .in_plans = true,
     .predict = use_relu_in_place,
     .configure = where_relus_are_trained},
    {.id = "channels_last",
     .label = "channels_last",
     .group = "layout",
     .has_module = true,
     .configure = where_images_are_convolved},
};

}  // namespace

std::span<const FixRow> list_step_fixes() { return kStepFixes; }

}  // namespace oomdiag
