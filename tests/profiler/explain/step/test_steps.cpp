#include <algorithm>

#include "profiler/explain/step/known_rest.h"
#include "profiler/explain/step/simulate_fits.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/step/whole_step.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

StepAllocation block(Category category, Phase phase, int64_t bytes, uint32_t born,
                     uint32_t died = StepAllocation::kNever) {
  return {.bytes = bytes, .born = born, .died = died, .category = category, .phase = phase};
}

StepAllocation named(StepAllocation life, const char* module) {
  life.made = {.op = "aten::linear", .module = module};
  return life;
}

StepAllocation weight() { return block(Category::parameter, Phase::setup, 8_MiB, StepAllocation::kBefore); }
StepAllocation activation(int64_t bytes = 64_MiB) {
  return named(block(Category::activation, Phase::forward, bytes, 1, 5), "layer");
}

/// Step 1 of a net with one parameter: its gradient and two tensors of state stay.
StepAllocations first_step() {
  return {.step = 1,
          .blocks = {weight(), activation(), block(Category::gradient, Phase::backward, 8_MiB, 3),
                     block(Category::optimizer_state, Phase::optimizer, 16_MiB, 6),
                     block(Category::temporary, Phase::optimizer, 8_MiB, 7, 8)}};
}

/// Step 2, which begins with what step 1 left. Its forward fails.
StepAllocations second_step(uint32_t gradient_died, int64_t bytes = 64_MiB) {
  StepAllocation failed_request = activation(bytes);
  failed_request.born = 2;
  failed_request.died = StepAllocation::kNever;
  return {
      .step = 2,
      .blocks = {weight(), block(Category::gradient, Phase::backward, 8_MiB, StepAllocation::kBefore, gradient_died),
                 block(Category::optimizer_state, Phase::optimizer, 16_MiB, StepAllocation::kBefore), failed_request}};
}

/// As many blocks as a step may have, each of another place; those that it began with are freed.
StepAllocations many_places(const std::vector<std::string>& modules, bool died) {
  StepAllocations step{.step = 2};
  for (const std::string& module : modules) {
    StepAllocation old =
        block(Category::input, Phase::other, 1_MiB, StepAllocation::kBefore, died ? 1 : StepAllocation::kNever);
    old.made = {.op = "aten::to", .module = module};
    step.blocks.push_back(old);
  }
  for (size_t i = 0; i < modules.size(); ++i) {
    StepAllocation made = block(Category::input, Phase::forward, 1_MiB, static_cast<uint32_t>(i + 2));
    made.made = {.op = "aten::to", .module = modules[modules.size() - 1 - i]};
    step.blocks.push_back(made);
  }
  return step;
}

LiveBlock parameter(const char* name, int64_t bytes, const char* group = "") {
  LiveBlock live{.bytes = bytes, .category = Category::parameter, .name = name, .group = group};
  live.trained = !live.group.empty();
  return live;
}

}  // namespace

TEST_CASE("what a step of 100 000 places makes again is found at once", "[explain]") {
  std::vector<std::string> modules;
  for (int i = 0; i < 50'000; ++i) modules.push_back("m" + std::to_string(i));
  const StepAllocations step = run_on(many_places(modules, true), many_places(modules, false));
  CHECK(step.blocks.size() >= 100'000);  // 2.5 ∙ 10⁹ comparisons of blocks else
}

TEST_CASE("a step that was cut short is like the one before if it asked for the same", "[explain][steps]") {
  CHECK(is_like(second_step(1), first_step()));
  CHECK(is_like(second_step(1, 64_MiB + 512), first_step()));  // a block that was not split
  CHECK_FALSE(is_like(second_step(1, 80_MiB), first_step()));
  CHECK_FALSE(is_like(second_step(1), {}));

  StepAllocations training = second_step(1);
  training.blocks.push_back(activation());
  training.blocks.back().in_graph = true;
  std::swap(training.blocks.back(), training.blocks[3]);  // the failed request comes last
  CHECK_FALSE(is_like(training, first_step()));           // no graph was recorded there: it was an evaluation
}

TEST_CASE("what a first step leaves behind counts in the one after it", "[explain][steps]") {
  // 8 + 64 in forward; in the optimizer 8 + 8 + 16 + 8. The state lives from the beginning on.
  CHECK(find_peak(first_step().blocks) == 80_MiB);
  CHECK(find_peak(run_on(second_step(1), first_step()).blocks) == 8_MiB + 16_MiB + 64_MiB + 8_MiB);
  // Gradients that are set to zero only before backward live through forward as well.
  CHECK(find_peak(run_on(second_step(StepAllocation::kNever), first_step()).blocks) == 8_MiB + 16_MiB + 64_MiB + 8_MiB);
}

TEST_CASE("a variable holds the last step's tensor until it is made again", "[explain][steps]") {
  StepAllocations whole{.step = 1,
                        .blocks = {weight(), named(block(Category::output, Phase::forward, 32_MiB, 1), "head"),
                                   block(Category::gradient, Phase::backward, 8_MiB, 2)}};
  StepAllocations cut{.step = 2,
                      .blocks = {weight(), named(block(Category::output, Phase::forward, 32_MiB, 0), "head"),
                                 named(block(Category::output, Phase::forward, 32_MiB, 1), "head")}};
  const StepAllocations step = run_on(cut, whole);
  CHECK(find_peak(step.blocks) == 8_MiB + 2 * 32_MiB + 8_MiB);
  CHECK(step.step == 2);
}

TEST_CASE("what a step left is there up to where the next one failed, though that one has made the same again",
          "[explain][steps]") {
  const auto result = [](uint32_t born, const char* module) {
    return named(block(Category::activation, Phase::forward, 32_MiB, born), module);
  };
  const StepAllocations whole{.step = 1, .blocks = {result(1, "a"), result(2, "b"), result(3, "c")}};
  const StepAllocations cut{
      .step = 2,
      .blocks = {result(0, "a"), result(0, "b"), result(0, "c"), result(1, "a"), result(2, "b"), result(3, "c")}};
  REQUIRE(is_like(cut, whole));
  CHECK(find_peak(run_on(cut, whole).blocks) == 6 * 32_MiB);  // a graph, which goes as a whole
}

TEST_CASE(
    "a cache that is made anew, a little larger in each step, is there twice while it is made, and not three times",
    "[explain][steps]") {
  const auto cache = [](int64_t bytes, uint32_t born, uint32_t died) {
    StepAllocation life = named(block(Category::output, Phase::forward, bytes, born, died), "attn");
    life.made.op = "aten::cat";
    return life;
  };
  const StepAllocations whole{
      .step = 8, .blocks = {cache(64_MiB, StepAllocation::kBefore, 2), cache(65_MiB, 1, StepAllocation::kNever)}};
  const StepAllocations cut{.step = 9,
                            .blocks = {cache(65_MiB, StepAllocation::kBefore, StepAllocation::kNever),
                                       cache(66_MiB, 1, StepAllocation::kNever)}};
  REQUIRE(is_like(cut, whole));
  CHECK(find_peak(run_on(cut, whole).blocks) == 64_MiB + 65_MiB);
}

TEST_CASE("the first batch, which is older than the first step, is there in the next one as well", "[explain][steps]") {
  StepAllocation batch = block(Category::input, Phase::setup, 32_MiB, StepAllocation::kBefore);
  batch.made = {.op = "aten::randn", .source = "train.py:9"};
  StepAllocations whole = first_step();
  whole.blocks.insert(whole.blocks.begin(), batch);
  StepAllocations cut = second_step(1);
  batch.died = 1;
  cut.blocks.insert(cut.blocks.begin(), batch);
  const int64_t without = find_peak(run_on(cut, whole).blocks);
  StepAllocation next = batch;
  next.phase = Phase::other;
  next.born = 1;
  next.died = StepAllocation::kNever;
  cut.blocks.insert(cut.blocks.end() - 1, next);
  CHECK(find_peak(run_on(cut, whole).blocks) == without + 32_MiB);
}

TEST_CASE("a later step already has what the one before it left behind", "[explain][steps]") {
  StepAllocations whole = first_step();
  whole.step = 2;
  whole.blocks[3].born = StepAllocation::kBefore;
  whole.blocks.push_back(block(Category::gradient, Phase::backward, 8_MiB, StepAllocation::kBefore, 1));
  CHECK(find_peak(run_on(second_step(1), whole).blocks) == find_peak(whole.blocks));
}

TEST_CASE("layers that were not called yet keep what the last one like them keeps", "[explain][steps]") {
  MemoryState state{.phase = Phase::forward};
  for (const char* name : {"h.0.w", "h.1.w", "h.2.w", "h.3.w"}) state.blocks.push_back(parameter(name, 4_MiB));
  state.blocks.push_back(parameter("head.w", 1_MiB));
  StepAllocations cut{.step = 1};
  const auto keep = [](const char* module, int64_t bytes, uint32_t born) {
    return named(block(Category::activation, Phase::forward, bytes, born), module);
  };
  cut.blocks = {keep("h.0", 10_MiB, 1), keep("h.0", 20_MiB, 2), keep("h.1", 10_MiB, 3), keep("h.1", 20_MiB, 4),
                keep("h.2", 10_MiB, 5)};
  const KnownRest rest = add_known_rest(cut, state);

  CHECK(rest.modules_to_come == 2);                                         // h.3 and head
  CHECK(find_peak(rest.step_allocations.blocks) == 4 * (10_MiB + 20_MiB));  // h.2 was under way
  CHECK(std::any_of(rest.step_allocations.blocks.begin(), rest.step_allocations.blocks.end(),
                    [](const StepAllocation& life) { return life.made.module == "h.3"; }));
}

TEST_CASE("layers with other parameters show nothing", "[explain][steps]") {
  MemoryState state{.phase = Phase::forward};
  state.blocks = {parameter("h.0.w", 4_MiB), parameter("h.1.w", 4_MiB), parameter("h.2.w", 8_MiB)};
  const StepAllocations cut{.step = 1,
                            .blocks = {named(block(Category::activation, Phase::forward, 9_MiB, 1), "h.0"),
                                       named(block(Category::activation, Phase::forward, 9_MiB, 2), "h.1")}};
  CHECK(find_peak(add_known_rest(cut, state).step_allocations.blocks) == 18_MiB);
}

TEST_CASE("gradients and Adam's state that are still to be made count, those that are there count once",
          "[explain][steps]") {
  MemoryState state{.phase = Phase::backward};
  state.blocks = {parameter("a", 40_MiB, "AdamW, group 0"), parameter("b", 60_MiB, "AdamW, group 0"),
                  parameter("frozen", 50_MiB)};
  StepAllocations cut{.step = 1,
                      .blocks = {block(Category::parameter, Phase::setup, 150_MiB, StepAllocation::kBefore)}};
  const KnownRest rest = add_known_rest(cut, state);
  CHECK(rest.gradient_bytes == 100_MiB);
  CHECK(rest.state_bytes == 200_MiB);
  CHECK(find_peak(rest.step_allocations.blocks) == 150_MiB + 300_MiB);

  cut.blocks.push_back(block(Category::gradient, Phase::backward, 40_MiB, 1));
  cut.blocks.push_back(block(Category::optimizer_state, Phase::setup, 200_MiB, StepAllocation::kBefore));
  const KnownRest resumed = add_known_rest(cut, state);
  CHECK(resumed.gradient_bytes == 60_MiB);
  CHECK(resumed.state_bytes == 0);
}

TEST_CASE("of several models of one structure one is trained", "[explain][steps]") {
  MemoryState state{.phase = Phase::forward};
  for (int copy = 0; copy < 3; ++copy) state.blocks.push_back(parameter("fc.weight", 40_MiB, "Adam, group 0"));
  const StepAllocations cut{.step = 1,
                            .blocks = {block(Category::parameter, Phase::setup, 120_MiB, StepAllocation::kBefore)}};
  const KnownRest rest = add_known_rest(cut, state);
  CHECK(rest.gradient_bytes == 40_MiB);
  CHECK(rest.state_bytes == 80_MiB);
}

TEST_CASE("a model that took no part in forward gets no gradient", "[explain][steps]") {
  MemoryState state{.phase = Phase::backward};
  state.blocks = {parameter("student.fc.weight", 40_MiB, "Adam, group 0"),
                  parameter("old.fc.weight", 60_MiB, "Adam, group 0")};
  StepAllocations cut{.step = 1,
                      .blocks = {block(Category::parameter, Phase::setup, 100_MiB, StepAllocation::kBefore)}};
  cut.blocks.push_back(named(block(Category::activation, Phase::forward, 8_MiB, 1), "student.fc"));
  CHECK(add_known_rest(cut, state).gradient_bytes == 40_MiB);
}

TEST_CASE("the state of an optimizer is recognised by its class", "[explain][steps]") {
  CHECK(least_state("AdamW, group 1") == 2);
  CHECK(least_state("AdamW 2, group 0 (head)") == 2);
  CHECK(least_state("RMSprop, group 0") == 1);
  CHECK(least_state("SGD, group 0") == 0);  // momentum or not
  CHECK(least_state("") == 0);
}

TEST_CASE("a step whose bytes fit may fail because of fragmentation", "[explain][steps]") {
  Allocations blocks;
  for (uint32_t i = 0; i < 8; ++i) {  // every other one stays, so no free block holds the large one
    blocks.push_back(block(Category::temporary, Phase::forward, 12_MiB, 1 + i, i % 2 == 0 ? 20 : 40));
  }
  blocks.push_back(block(Category::output, Phase::forward, 40_MiB, 21, 40));
  REQUIRE(find_peak(blocks) == 96_MiB);
  CHECK(simulate_fits(blocks, 200_MiB, {}));
  CHECK_FALSE(simulate_fits(blocks, 96_MiB, {}));  // the next step cuts the large segment up
  for (StepAllocation& life : blocks) life.bytes = life.bytes == 12_MiB ? 6_MiB : life.bytes;
  CHECK(find_peak(blocks) == 64_MiB);
  CHECK_FALSE(simulate_fits(blocks, 90_MiB, {}));  // three of 6 MiB share a segment of 20
  CHECK(simulate_fits(blocks, 110_MiB, {.expandable_segments = true}));
}

TEST_CASE("after an OOM the step before is followed to its end", "[replay][lives]") {
  EventBuilder trace({.gpu_bytes = 320_MiB});
  const SmallTraining training;
  training.setup(trace);
  training.forward(trace, 0);
  training.backward(trace, 0);
  training.optimizer(trace, true);
  training.zero_grad(trace);
  trace.op({.op = "aten::randn", .source = "train.py:9"}).oom(1_GiB).op_failed();

  const Trace& built = trace;
  const DeviceHistory device = replay(built).devices.at(0);
  CHECK(device.complete.step == 1);
  CHECK(find_peak(device.complete.blocks) == device.peak.allocated_bytes);
  const Trace first = oom_in_backward();
  CHECK(replay(first).devices.at(0).complete == StepAllocations{});
}

}  // namespace oomdiag
