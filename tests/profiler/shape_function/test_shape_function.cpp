#include "profiler/shape_function/evaluate.h"
#include "profiler/shape_function/shape_function.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

/// Three steps of a program whose activations follow the batch; `workspace` of one op is what its library likes.
AllocationSequence run(int64_t batch, int64_t workspace = 0) {
  EventBuilder builder;
  builder.op({.op = "aten::empty"}).alloc("weights", 30_MiB);
  for (int step = 1; step <= 3; ++step) {
    builder.op({.op = "aten::conv2d", .module = "a"}).alloc("a", batch * 3_MiB);
    if (workspace > 0) builder.alloc("w", workspace).free("w");
    builder.op({.op = "aten::relu", .module = "b"}).alloc("b", batch * 5_MiB).free("a").free("b");
    builder.begin_scope("Optimizer.step#SGD.step").end_scope("Optimizer.step#SGD.step");
    builder.trace().step_ends.push_back(builder.trace().events.back().sequence);
  }
  builder.trace().process.end_state = EndState::exited;
  return read_allocation_sequence(builder.trace());
}

ShapeFunction learn(const std::vector<int64_t>& batches) {
  std::vector<ShapeSample> samples;
  for (const int64_t batch : batches) samples.push_back({{batch}, run(batch)});
  return ShapeFunction::learn(std::move(samples));
}

}  // namespace

TEST_CASE("three runs give the peak of every batch", "[shape_function]") {
  const ShapeFunction function = learn({4, 16, 40});
  REQUIRE(function.unknown().empty());
  for (const int64_t batch : {2, 8, 100}) {
    const ShapeEstimate estimate = evaluate(function, {batch}, 100_GiB);
    CHECK(estimate.is_exact());
    CHECK(estimate.fits);
    CHECK(estimate.peak_allocated_bytes == 30_MiB + batch * 8_MiB);
  }
  const std::vector<std::string> names{"batch"};
  CHECK(to_text(peak_formula(function, {20}), names) == "0.03 GiB + 8.00 MiB·batch");
}

TEST_CASE("a convolution that does not get its workspace goes on, and that is doubted", "[shape_function]") {
  const ShapeFunction function =
      ShapeFunction::learn({{{4}, run(4, 40_MiB)}, {{16}, run(16, 160_MiB)}, {{40}, run(40, 400_MiB)}});
  const ShapeEstimate roomy = evaluate(function, {20}, 100_GiB), tight = evaluate(function, {20}, 280_MiB);
  CHECK(roomy.is_exact());
  CHECK(tight.fits);
  CHECK_FALSE(tight.is_exact());
  CHECK(tight.peak_allocated_bytes == 190_MiB);
  CHECK_FALSE(evaluate(function, {20}, 150_MiB).fits);  // what is no workspace must be given
}

TEST_CASE("a batch of one is doubted if no run had it", "[shape_function]") {
  CHECK_FALSE(evaluate(learn({4, 16, 40}), {1}, 100_GiB).is_exact());
  CHECK(evaluate(learn({1, 16, 40}), {1}, 100_GiB).is_exact());
}

TEST_CASE("a workspace that cannot set the peak makes no doubt", "[shape_function]") {
  const ShapeFunction function = ShapeFunction::learn({{{4}, run(4)},
                                                       {{16}, run(16)},
                                                       {{60}, run(60, 3_MiB)},
                                                       {{90}, run(90, 7_MiB)}});  // relu makes 5 MiB of each example
  const ShapeEstimate between = evaluate(function, {70}, 100_GiB);
  CHECK(between.peak_allocated_bytes == 30_MiB + 70 * 8_MiB);
  CHECK(between.allocated_is_exact);
  CHECK(between.doubt.empty() == between.is_exact());
}

TEST_CASE("runs that differ in more than temporaries are structures of their own", "[shape_function]") {
  const auto keep_last = [](AllocationSequence sequence) {
    sequence.items.pop_back();
    return sequence;
  };
  const ShapeFunction function =
      ShapeFunction::learn({{{4}, run(4)}, {{16}, run(16)}, {{60}, keep_last(run(60))}, {{90}, keep_last(run(90))}});
  CHECK(function.structures().size() == 2);
  CHECK(function.is_within_structure({8}));
  CHECK_FALSE(function.is_within_structure({30}));
  CHECK(evaluate(function, {8}, 100_GiB).is_exact());
  CHECK_FALSE(evaluate(function, {30}, 100_GiB).is_exact());
}

TEST_CASE("where it fails is reported with the step and the place", "[shape_function]") {
  const ShapeEstimate estimate = evaluate(learn({4, 16, 40}), {100}, 500_MiB);
  CHECK_FALSE(estimate.fits);
  CHECK(estimate.step == 1);
  CHECK(estimate.place.find("aten::relu ← b") != std::string::npos);
  CHECK(estimate.requested_bytes == 500_MiB);
}

TEST_CASE("a workspace that only larger runs have makes a doubt, and the nearest run decides", "[shape_function]") {
  const ShapeFunction function =
      ShapeFunction::learn({{{4}, run(4)}, {{16}, run(16)}, {{60}, run(60, 600_MiB)}, {{90}, run(90, 960_MiB)}});
  CHECK(function.structures().size() == 1);
  const ShapeEstimate below = evaluate(function, {8}, 100_GiB);  // between runs that had none, but one may begin there
  CHECK(below.peak_allocated_bytes == 30_MiB + 8 * 8_MiB);
  CHECK_FALSE(below.is_exact());
  const ShapeEstimate between = evaluate(function, {80}, 100_GiB);
  CHECK_FALSE(between.is_exact());
  CHECK(between.doubtful_bytes == 840_MiB);
  CHECK(between.peak_allocated_bytes == 30_MiB + 80 * 3_MiB + 840_MiB);
  CHECK_FALSE(evaluate(function, {30}, 100_GiB).is_exact());
}

TEST_CASE("a run that was stopped counts up to the last step that all have", "[shape_function]") {
  AllocationSequence stopped = run(16);
  stopped.cut(2);
  CHECK_FALSE(stopped.ended);
  const ShapeFunction function = ShapeFunction::learn({{{4}, run(4)}, {{16}, stopped}, {{40}, run(40)}});
  CHECK(function.structures().size() == 1);
  CHECK(function.structures().front().sequence.step_ends.size() == 2);
  CHECK(evaluate(function, {10}, 100_GiB).is_exact());
}

TEST_CASE("of a run without steps beside others that have some nothing is learned", "[shape_function]") {
  AllocationSequence without = run(16);
  without.step_ends.clear();
  CHECK(ShapeFunction::learn({{{4}, run(4)}, {{16}, without}}).unknown() == "it makes no steps");
}

TEST_CASE("a run that ran out of memory teaches nothing", "[shape_function]") {
  EventBuilder builder({.gpu_bytes = 100_MiB});
  builder.op({.op = "aten::empty"}).alloc("weights", 30_MiB).oom(200_MiB);
  CHECK(read_allocation_sequence(builder.trace()).unusable == "it ran out of memory");
}

}  // namespace oomdiag
