#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/step/step_model.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/one_of.h"
#include "profiler/replay/evidence/categories.h"
#include "profiler/replay/history.h"

// bf16 autocast (torch/amp, ATen/autocast_mode.h). Matrix products and convolutions take and give bfloat16; softmax, norms
// over features, losses and some functions take and give float32; all other ops go on with what they get. So the type of a
// tensor follows from the ops before it:
//
//   conv (bf16) → relu (bf16) → … → linear (bf16) → cross_entropy (float32)
//   embedding (float32) → layer_norm (float32) → linear (bf16) → gelu (bf16) → add to the residual (float32)
//
// A float32 tensor that goes into a matrix product is cast, and the copy is what autograd keeps. The weights are cast too;
// their copies live until the backward of their layer.
//
// Of a step that was cut short a lower bound is wanted. Which types its ops have follows from ops that may not have been
// seen, so there all that autocast may halve is halved, and no copy is added: all but float32 results, and what the ops behind
// them in the same module make of as many elements.

namespace oomdiag {
namespace {

bool lowers(std::string_view op) {
  constexpr std::array<std::string_view, 6> kLowering = {"aten::conv1d", "aten::conv2d", "aten::conv3d",
                                                         "aten::einsum", "aten::prelu",  "aten::chain_matmul"};
  return is_gemm(op) || is_one_of(op, kLowering) || op.find("convolution") != op.npos ||
         op.find("scaled_dot_product") != op.npos || op.find("rnn") != op.npos || op.find("lstm") != op.npos;
}

bool raises(std::string_view op) {
  constexpr std::array<std::string_view, 24> kRaising = {"aten::softmax",
                                                         "aten::log_softmax",
                                                         "aten::layer_norm",
                                                         "aten::group_norm",
                                                         "aten::pow",
                                                         "aten::exp",
                                                         "aten::log",
                                                         "aten::sum",
                                                         "aten::prod",
                                                         "aten::norm",
                                                         "aten::cumsum",
                                                         "aten::rsqrt",
                                                         "aten::reciprocal",
                                                         "aten::nll_loss",
                                                         "aten::nll_loss_nd",
                                                         "aten::mse_loss",
                                                         "aten::cross_entropy_loss",
                                                         "aten::l1_loss",
                                                         "aten::smooth_l1_loss",
                                                         "aten::softplus",
                                                         "aten::expm1",
                                                         "aten::log1p",
                                                         "aten::cosine_similarity",
                                                         "aten::binary_cross_entropy_with_logits"};
  return is_one_of(op, kRaising);
}

bool is_addition(std::string_view op) { return op == "aten::add" || op == "aten::add_" || op == "aten::sub"; }

// Types that autocast does not touch; a block whose type is not known is taken for float32.
bool is_float32(const StepAllocation& block) { return block.shape.empty() || block.shape.ends_with("float32"); }

// What a reduction keeps between its blocks of threads is float32 whatever goes in.
bool is_partial_sum(const StepAllocation& block) {
  return block.category == Category::temporary && block.made.inner == "aten::sum";
}

bool is_low_saver(const Where& saver) { return lowers(saver.op); }

using ForwardPlace = std::tuple<std::string_view, std::string_view, std::string_view>;
ForwardPlace place_of(const Where& where) { return {where.op, where.module, where.source}; }

/// Goes through the step and halves what would be bfloat16.
class Caster {
 public:
  Caster(Allocations blocks, bool whole)
      : blocks_(std::move(blocks)), last_backward_(find_last_backward(blocks_)), whole_(whole) {}

  Allocations cast() {
    const size_t count = blocks_.size();
    for (size_t b = 0; b < count; ++b) {
      if (blocks_[b].phase == Phase::forward && blocks_[b].is_of_step()) cast_forward(b);
      if (blocks_[b].phase == Phase::backward) cast_backward(blocks_[b]);
      const bool is_argument = !blocks_[b].is_of_step() || blocks_[b].category == Category::input;
      if (whole_ && is_argument) copy_argument(b);
    }
    blocks_.insert(blocks_.end(), copies_.begin(), copies_.end());
    std::stable_sort(blocks_.begin(), blocks_.end(), [](auto& a, auto& b) { return a.born < b.born; });
    return std::move(blocks_);
  }
  bool any() const { return any_; }

 private:
  void cast_forward(size_t b) {
    StepAllocation& block = blocks_[b];
    if (block.category == Category::input) return;
    const std::string_view op = block.made.op;
    if (lowers(op)) {
      stream_is_low_ = any_ = true;
    } else if (raises(op)) {
      if (stream_is_low_ && whole_) copy_operand(block);
      stream_is_low_ = false;
    } else if (is_addition(op)) {
      stream_is_low_ = stream_is_low_ && residual_is_low_;
    }
    if (!begun_) residual_is_low_ = stream_is_low_;
    begun_ = true;
    low_[place_of(block.made)] = stream_is_low_;
    const bool only_cast =
        !block.saved_by.empty() && std::all_of(block.saved_by.begin(), block.saved_by.end(), is_low_saver);
    const bool may_be_low = !whole_ && !is_surely_float32(block);
    if (is_float32(block) && (stream_is_low_ || only_cast || may_be_low)) block.bytes /= 2;
  }

  bool is_surely_float32(const StepAllocation& block) {
    if (raises(block.made.op)) raised_ = {block.made.module, block.bytes};
    if (lowers(block.made.op)) raised_ = {};
    return raised_.bytes == block.bytes && raised_.module == block.made.module;
  }

  void cast_backward(StepAllocation& block) {
    if (block.category == Category::gradient || block.category == Category::parameter) return;
    const auto low = low_.find(place_of(block.made));
    const bool in_float32 = block.freed_by_accumulate || block.category == Category::workspace || is_partial_sum(block);
    const bool is_low = !whole_ ? is_float32(block) : low != low_.end() && low->second;
    if (is_low && !in_float32) block.bytes /= 2;
  }

  // What comes as bfloat16 and is as large as the result is cast for as long as the op runs, as of softmax.
  void copy_operand(const StepAllocation& result) {
    StepAllocation copy = result;
    copy.died = copy.born + 1;
    copies_.push_back(copy);
  }

  // What enters the step as float32 and goes into a matrix product: a copy of half its bytes, up to its last backward.
  void copy_argument(size_t b) {
    if (!is_float32(blocks_[b]) || blocks_[b].category == Category::activation) return;
    if (std::none_of(blocks_[b].saved_by.begin(), blocks_[b].saved_by.end(), is_low_saver)) return;
    StepAllocation copy = blocks_[b];
    copy.bytes /= 2;
    copy.born = std::max<uint32_t>(1, copy.born);
    copy.died = last_backward_ == 0 ? StepAllocation::kNever : last_backward_;
    copy.category = Category::activation;
    blocks_.push_back(copy);
  }

  Allocations blocks_, copies_;
  const uint32_t last_backward_;
  const bool whole_;
  std::map<ForwardPlace, bool> low_;  ///< by place of the forward op
  struct Raised {
    std::string_view module{};
    int64_t bytes = 0;
  };
  Raised raised_{};  ///< the newest float32 result
  bool stream_is_low_ = false, residual_is_low_ = true, begun_ = false, any_ = false;
};

bool is_under_autocast(const Allocations& blocks) {
  return std::any_of(blocks.begin(), blocks.end(),
                     [](const StepAllocation& block) { return !block.made.autocast.empty(); });
}

/// Not in an evaluation of a program that trains.
bool may_learn_in_step(const StepModel& model) { return may_train(model) && !is_without_backward(model); }

/// Not where autocast is on already, nor where the model is of another type.
std::optional<ModifiedStep> use_autocast(const StepModel& model, const char* type, const char* backward) {
  if (is_under_autocast(model.blocks) || !is_mostly_float32(model.blocks)) return {};
  Caster caster(model.blocks, model.whole);
  Allocations blocks = caster.cast();
  if (!caster.any()) return {};
  std::vector<std::string> lines{std::string("with torch.autocast(\"cuda\", ") + type + "):"};
  if (may_learn_in_step(model)) {
    lines.emplace_back("    loss = …  # forward only");
    lines.emplace_back(backward);
  } else {
    lines.emplace_back("    output = model(x)");
  }
  return ModifiedStep{.blocks = std::move(blocks), .lines = std::move(lines)};
}

std::optional<ModifiedStep> use_bf16_autocast(const StepModel& model) {
  if (!has_bfloat16(model.compute_major)) return {};
  return use_autocast(model, "torch.bfloat16", "loss.backward()");
}

std::optional<ModifiedStep> use_fp16_autocast(const StepModel& model) {
  if (has_bfloat16(model.compute_major)) return {};
  auto step =
      use_autocast(model, "torch.float16", "scaler = torch.amp.GradScaler(\"cuda\"); scaler.scale(loss).backward()");
  if (step && !may_learn_in_step(model)) step->label = "fp16 autocast";
  return step;
}

/// Where weights and what belongs to them are the peak, autocast only adds copies of them.
bool has_use_of_autocast(const ProgramFacts& program) {
  return program.profile.bytes_of_float32 > 0 && !program.profile.has_autocast && program.activations_count;
}

std::optional<ModuleSettings> where_bfloat16_is_new(const ProgramFacts& program) {
  return unless(!has_use_of_autocast(program) || !has_bfloat16(program.compute_major));
}

std::optional<ModuleSettings> where_float16_is_new(const ProgramFacts& program) {
  return unless(!has_use_of_autocast(program) || has_bfloat16(program.compute_major));
}

constexpr std::string_view kAutocastFormula =
    "half of what matrix products, convolutions and the ops after them make; float32 stays in softmax, norms and "
    "losses; "
    "+ half of the weights";

constexpr FixRow kAutocastFixes[] = {
    {.id = "autocast_bf16",
     .label = "bf16 autocast",
     .group = "autocast",
     .cost = FixCost::less_precise,
     .has_module = true,
     .formula = kAutocastFormula,
     .cost_text = "matrix products and convolutions round to 16 bits",
     .changes_numerics = true,
     .combines = true,
     .in_plans = true,
     .predict = use_bf16_autocast,
     .configure = where_bfloat16_is_new,
     .in_frameworks = {{"transformers", "TrainingArguments(…, bf16=True)"},
                       {"trl", "SFTConfig(…, bf16=True)"},
                       {"accelerate", "accelerator = Accelerator(mixed_precision=\"bf16\")"},
                       {"lightning", "Trainer(…, precision=\"bf16-mixed\")"},
                       {"deepspeed", R"("bf16": {"enabled": true})"}}},
    {.id = "autocast_fp16",
     .label = "fp16 autocast, loss scaled",
     .group = "autocast",
     .cost = FixCost::less_precise,
     .has_module = true,
     .formula = kAutocastFormula,
     .cost_text = "matrix products and convolutions round to 16 bits",
     .changes_numerics = true,
     .combines = true,
     .in_plans = true,
     .predict = use_fp16_autocast,
     .configure = where_float16_is_new,
     .in_frameworks = {{"transformers", "TrainingArguments(…, fp16=True)"},
                       {"trl", "SFTConfig(…, fp16=True)"},
                       {"accelerate", "accelerator = Accelerator(mixed_precision=\"fp16\")"},
                       {"lightning", "Trainer(…, precision=\"16-mixed\")"},
                       {"ultralytics", "model.train(…, amp=True)"},
                       {"deepspeed", R"("fp16": {"enabled": true})"}}},
};

}  // namespace

std::span<const FixRow> list_autocast_fixes() { return kAutocastFixes; }

}  // namespace oomdiag
