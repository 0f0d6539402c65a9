#include <algorithm>
#include <string>

#include "profiler/explain/fixes/fix_rules.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/step/simulate_fits.h"
#include "profiler/explain/step/step_model.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/words/shape.h"
#include "profiler/replay/history.h"

// Fewer examples at a time.

namespace oomdiag {
namespace {

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

// For larger shapes libraries take workspaces that the run had none of, and other holes are left: of 45 claims that bytes and blocks
// alone made, those of 90 times a batch of 2 ran out (tests/integration/test_batch_line.py).
int64_t keep_room_for_libraries(int64_t batch, int64_t largest) {
  constexpr int64_t kFar = 2, kKept = 10;  // times the batch; a tenth of what is added
  constexpr int64_t kFew = 16;             // samples, which say no more than as many times their number
  if (largest <= kFar * batch) return largest;
  const int64_t kept = largest - (largest - batch + kKept - 1) / kKept;
  return batch < kFew ? std::min(kFew * batch, kept) : kept;
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
  return ModifiedStep{.blocks = std::move(blocks), .variant = "2", .passes = 2};
}

/// Two micro-batches of each batch of a loader, whose optimizer steps after both.
std::optional<ModuleSettings> where_a_loader_makes_batches(const ProgramFacts& program) {
  const int64_t batch = program.profile.loader_batch;
  if (batch <= 1 || batch % 2 != 0 || !program.profile.has_optimizer) return {};
  return ModuleSettings{.settings = {{"batches", 2}}, .variant = "2"};
}

constexpr FixRow kBatchFixes[] = {
    {.id = "accumulate",
     .label = "gradient accumulation, 2 micro-batches",
     .group = "batch",
     .cost = FixCost::smaller_batches,
     .has_module = true,
     .formula = "peak over the step of fixed + scaling/2, gradients alive all the time",
     .cost_text = "two passes per step of half the size; batch norms see half the batch",
     .lines = "for micro_x, micro_y in zip(inputs.chunk(2), labels.chunk(2)):\n"
              "    (loss_of(model(micro_x), micro_y) / 2).backward()\n"
              "optimizer.step(); optimizer.zero_grad()",
     .combines = true,
     .in_plans = true,
     .predict = accumulate,
     .configure = where_a_loader_makes_batches,
     .in_frameworks =
         {{"transformers", "TrainingArguments(…, per_device_train_batch_size={batch}, gradient_accumulation_steps=2)"},
          {"trl", "SFTConfig(…, per_device_train_batch_size={batch}, gradient_accumulation_steps=2)"},
          {"accelerate",
           "accelerator = Accelerator(gradient_accumulation_steps=2)  # and DataLoader(…, batch_size={batch})\n"
           "with accelerator.accumulate(model):  # around the body of the loop"},
          {"lightning", "Trainer(…, accumulate_grad_batches=2)  # and DataLoader(…, batch_size={batch})"},
          {"deepspeed", R"("train_micro_batch_size_per_gpu": {batch}, "gradient_accumulation_steps": 2)"}}},
    {.id = "half_batch",
     .label = "half the batch",
     .group = "batch",
     .cost = FixCost::smaller_batches,
     .formula = "peak over the step of fixed + scaling/2",
     .changes_numerics = true,
     .changes_training = true,
     .predict = halve_batch,
     .in_frameworks =
         {{"transformers", "TrainingArguments(…, per_device_train_batch_size={batch})"},
          {"trl", "SFTConfig(…, per_device_train_batch_size={batch})"},
          {"ultralytics", "model.train(…, batch={batch})"},
          {"torch_geometric",
           "NeighborLoader(data, num_neighbors=[10, 10], batch_size={batch})  # a part of the graph at a time"},
          {"captum",
           "attributions = method.attribute(…, internal_batch_size=8)  # of n_steps or n_samples so many at a time"},
          {"deepspeed", R"("train_micro_batch_size_per_gpu": {batch})"}}},
    {.id = "batch",
     .label = "a smaller batch",
     .group = "batch",
     .cost = FixCost::smaller_batches,
     .formula = "largest b with peak over the step of fixed + scaling ∙ b/batch ≤ available memory",
     .changes_numerics = true,
     .changes_training = true,
     .predict = fit_batch,
     .in_frameworks = {{"transformers", "TrainingArguments(…, per_device_train_batch_size={batch})"},
                       {"trl", "SFTConfig(…, per_device_train_batch_size={batch})"},
                       {"ultralytics", "model.train(…, batch={batch})"},
                       {"deepspeed", R"("train_micro_batch_size_per_gpu": {batch})"}}},
};

}  // namespace

int64_t find_largest_batch(const StepModel& model, int64_t batch) {
  constexpr int64_t kFarthest = int64_t{1} << 20;  // times the batch: nothing follows it
  if (model.blocks.size() > kMaxSimulated) return 0;
  if (!fits_with(model, batch, batch)) {
    return model.peak_bytes > model.available_bytes ? bisect_batch(model, batch, 0, batch) : batch;
  }
  int64_t times = 2;
  while (times < kFarthest && fits_with(model, times * batch, batch)) times *= 2;
  if (times == kFarthest) return batch;
  return keep_room_for_libraries(batch, bisect_batch(model, batch, times / 2 * batch, times * batch));
}

std::span<const FixRow> list_batch_fixes() { return kBatchFixes; }

}  // namespace oomdiag
