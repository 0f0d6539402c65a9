#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/framework_lines.h"
#include "tests/catch.h"

namespace oomdiag {

TEST_CASE("the framework is the one that drives the loop, not what it is made of", "[explain]") {
  CHECK(find_framework("site-packages/transformers/models/gpt2/modeling_gpt2.py:31 in forward\n"
                       "site-packages/accelerate/utils/operations.py:818 in forward\n"
                       "site-packages/transformers/trainer.py:3749 in training_step\n"
                       "train.py:12 in main") == "transformers");
  CHECK(find_framework("site-packages/lightning/pytorch/strategies/strategy.py:390 in training_step") == "lightning");
  CHECK(find_framework("site-packages/transformers/models/gpt2/modeling_gpt2.py:31 in forward\ntrain.py:3 in main")
            .empty());
}

TEST_CASE("a fix is written in the words of the framework, with the batch that is known", "[explain]") {
  using Lines = std::vector<std::string>;
  CHECK(lines_in_framework("transformers", "checkpoint", {}) ==
        Lines{"TrainingArguments(…, gradient_checkpointing=True)"});
  CHECK(lines_in_framework("transformers", "accumulate_2", 4) ==
        Lines{"TrainingArguments(…, per_device_train_batch_size=4, gradient_accumulation_steps=2)"});
  CHECK(lines_in_framework("ultralytics", "batch_12", 12) == Lines{"model.train(…, batch=12)"});
  CHECK(lines_in_framework("deepspeed", "half_batch", {}) == Lines{"\"train_micro_batch_size_per_gpu\": …"});
  CHECK(lines_in_framework("torchdiffeq", "checkpoint_each_pass", {})
            ->front()
            .starts_with("from torchdiffeq import odeint_adjoint as odeint  # "));
  CHECK_FALSE(lines_in_framework("transformers", "relu_in_place", {}));
  CHECK_FALSE(lines_in_framework("", "checkpoint", {}));
}

}  // namespace oomdiag
