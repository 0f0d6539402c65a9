#include "profiler/explain/explain.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/replay/allocations/growth_samples.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

/// One place whose levels were read at the ends of steps 1, 2, …; `blocks` of them, or one.
StepCurves one_place(std::vector<int64_t> bytes, std::vector<int64_t> blocks = {}, std::vector<double> workload = {}) {
  StepCurves curves;
  for (uint32_t step = 1; step <= bytes.size(); ++step) curves.steps.push_back(step);
  if (blocks.empty()) blocks.assign(bytes.size(), 1);
  if (workload.empty()) workload.assign(bytes.size(), 1);
  curves.workload = workload;
  PlaceCurve curve;
  curve.where.op = "aten::relu";
  curve.bytes = bytes;
  curve.blocks = blocks;
  curves.places.push_back(curve);
  return curves;
}

std::vector<int64_t> levels(size_t count, int64_t (*level)(int64_t)) {
  std::vector<int64_t> result;
  for (size_t i = 0; i < count; ++i) result.push_back(level(static_cast<int64_t>(i)));
  return result;
}

/// Small training steps after which `leak` is called with the step.
template <class Leak>
const Trace& train(EventBuilder& trace, uint64_t steps, Leak leak) {
  const SmallTraining training;
  training.setup(trace);
  for (uint64_t step = 0; step < steps; ++step) {
    training.forward(trace, step * 3);
    leak(step);
    training.backward(trace, step * 3);
    training.optimizer(trace, step == 0);
    training.zero_grad(trace);
  }
  return trace;
}

}  // namespace

TEST_CASE("a tensor that each step leaves behind grows", "[explain][growth]") {
  const auto growths = find_growth(one_place({4_MiB, 8_MiB, 12_MiB, 16_MiB}, {1, 2, 3, 4}));

  REQUIRE(growths.size() == 1);
  CHECK(growths[0].kind == GrowthKind::kept_tensors);
  CHECK(growths[0].bytes_per_step == 4_MiB);
  CHECK(growths[0].grown_bytes == 12_MiB);
  CHECK(growths[0].last_step == 4);
}

TEST_CASE("three steps are too few to show growth", "[explain][growth]") {
  CHECK(find_growth(one_place({4_MiB, 8_MiB, 12_MiB}, {1, 2, 3})).empty());
}

TEST_CASE("a tensor that is made larger each time is a growing buffer", "[explain][growth]") {
  const auto growths = find_growth(one_place({1_MiB, 2_MiB, 3_MiB, 4_MiB, 5_MiB}));

  REQUIRE(growths.size() == 1);
  CHECK(growths[0].kind == GrowthKind::growing_buffer);
  CHECK(growths[0].bytes_per_step == 1_MiB);
}

TEST_CASE("caches of layers that are alike grow for one reason", "[explain][growth]") {
  StepCurves curves = one_place({1_MiB, 2_MiB, 3_MiB, 4_MiB, 5_MiB});
  curves.places[0].where.module = "h.0.attn";
  curves.places.push_back(curves.places[0]);
  curves.places[1].where.module = "h.1.attn";
  curves.places.push_back(curves.places[0]);
  curves.places[2].where.module = "head";
  const auto growths = find_growth(curves);

  REQUIRE(growths.size() == 2);
  CHECK(growths[0].place_count == 2);
  CHECK(growths[0].grown_bytes == 8_MiB);
}

TEST_CASE("a tensor that becomes larger because the batch does is no growth", "[explain][growth]") {
  CHECK(find_growth(one_place({1_MiB, 2_MiB, 3_MiB, 4_MiB}, {}, {1, 2, 3, 4})).empty());
  CHECK(find_growth(one_place({1_MiB, 5_MiB, 2_MiB, 4_MiB, 3_MiB, 6_MiB}, {}, {1, 5, 2, 4, 3, 6})).empty());
}

TEST_CASE("tensors that pile up are growth, whatever the batch does", "[explain][growth]") {
  CHECK(find_growth(one_place({1_MiB, 3_MiB, 6_MiB, 10_MiB}, {1, 2, 3, 4}, {1, 2, 3, 4})).size() == 1);
}

TEST_CASE("what step 1 made and then stays is no growth", "[explain][growth]") {
  CHECK(find_growth(one_place({0, 8_MiB, 8_MiB, 8_MiB, 8_MiB, 8_MiB}, {0, 1, 1, 1, 1, 1})).empty());
}

TEST_CASE("one jump is no growth, however late", "[explain][growth]") {
  CHECK(find_growth(one_place({8_MiB, 8_MiB, 8_MiB, 24_MiB}, {1, 1, 1, 3})).empty());
  CHECK(find_growth(one_place({8_MiB, 8_MiB, 16_MiB, 24_MiB}, {1, 1, 2, 3})).empty());
}

TEST_CASE("a cache that fills up and then stays is no growth", "[explain][growth]") {
  const auto filled = [](int64_t i) { return std::min<int64_t>(i, 6) * 1_MiB; };
  CHECK(find_growth(one_place(levels(20, filled), levels(20, [](int64_t i) { return std::min<int64_t>(i, 6); })))
            .empty());
}

TEST_CASE("a cache that still fills, but more and more slowly, is no growth", "[explain][growth]") {
  const auto slower = [](int64_t i) { return (i < 10 ? i * 10 : 100 + (i - 10) / 5) * 1_MiB; };
  CHECK(find_growth(one_place(levels(24, slower), levels(24, slower))).empty());
}

TEST_CASE("what is emptied from time to time is no growth", "[explain][growth]") {
  const auto saw = [](int64_t i) { return (i % 4) * 1_MiB; };
  CHECK(find_growth(one_place(levels(24, saw), levels(24, saw))).empty());
}

TEST_CASE("growth every few steps only is growth", "[explain][growth]") {
  const auto stairs = [](int64_t i) { return (i / 3) * 3_MiB; };
  const auto growths = find_growth(one_place(levels(24, stairs), levels(24, [](int64_t i) { return i / 3; })));

  REQUIRE(growths.size() == 1);
  CHECK(growths[0].bytes_per_step == 21_MiB / 23);
}

TEST_CASE("the ops of one graph that stays alive are one reason", "[explain][growth]") {
  StepCurves curves = one_place({64_MiB, 128_MiB, 192_MiB, 256_MiB}, {1, 2, 3, 4});
  curves.places.push_back(curves.places[0]);
  curves.places[0].in_graph = curves.places[1].in_graph = true;
  curves.places[1].where = {.op = "aten::mean", .source = "train.py:12"};
  curves.places[1].newest = 7;
  const auto growths = find_growth(curves);

  REQUIRE(growths.size() == 1);
  CHECK(growths[0].kind == GrowthKind::retained_graph);
  CHECK(growths[0].bytes_per_step == 128_MiB);
  CHECK(growths[0].held.source == "train.py:12");
  CHECK(growths[0].place_count == 2);
}

TEST_CASE("steady training does not grow, though its optimizer state came with step 1", "[explain][growth]") {
  EventBuilder trace({.gpu_bytes = 1_GiB});
  const Trace& built = train(trace, 12, [](uint64_t) {});

  CHECK(find_growth(replay(built).devices.at(0).curves).empty());
}

TEST_CASE("a list of outputs is found in a trace, with op, module and line", "[explain][growth]") {
  EventBuilder trace({.gpu_bytes = 2_GiB});
  const Trace& built = train(trace, 8, [&](uint64_t step) {
    trace.op({.op = "aten::softmax", .module = "head", .source = "train.py:20"});
    trace.alloc("kept " + std::to_string(step), 6_MiB).no_op();
  });
  const auto growths = find_growth(replay(built).devices.at(0).curves);

  REQUIRE(growths.size() == 1);
  CHECK(growths[0].held.op == "aten::softmax");
  CHECK(growths[0].held.module == "head");
  CHECK(growths[0].held.source == "train.py:20");
  CHECK(growths[0].bytes_per_step == 6_MiB);
}

TEST_CASE("an OOM that would not have come without the growth is a leak", "[explain][growth]") {
  EventBuilder trace({.gpu_bytes = 512_MiB});
  train(trace, 7, [&](uint64_t step) {
    trace.op({.op = "aten::clone", .source = "train.py:20"});
    trace.alloc("kept " + std::to_string(step), 16_MiB).no_op();
  });
  const SmallTraining training;
  trace.op({.op = "aten::relu"}).nodes(21).alloc("x", 64_MiB).alloc("y", 64_MiB).oom(320_MiB).op_failed();
  const Trace& built = trace;
  const DeviceHistory device = replay(built).devices.at(0);
  const Findings findings = explain(device, {.device = gpu_of(512_MiB)});

  REQUIRE(findings.cause);
  CHECK(findings.cause->kind == CauseKind::leak);
  CHECK(findings.cause->facts.bytes_per_step == 16_MiB);
}

TEST_CASE("of long runs evenly spread steps are kept", "[explain][growth]") {
  GrowthSamples meter;
  Event event;
  event.kind = EventKind::alloc;
  event.bytes = 512;
  for (uint32_t step = 1; step <= 10000; ++step) {
    meter.add(event);
    meter.end_step(step);
  }
  const StepCurves curves = meter.finish({}, {});

  CHECK(curves.steps.size() <= GrowthSamples::kMaxSamples);
  CHECK(curves.steps.size() >= GrowthSamples::kMaxSamples / 2);
  CHECK(curves.steps.front() == 1);
  const auto growths = find_growth(curves);
  REQUIRE(growths.size() == 1);
  CHECK(growths[0].bytes_per_step == 512);
}

TEST_CASE("growth is kept by the variable that refers to most of its tensors", "[explain][growth]") {
  auto growths = find_growth(one_place({4_MiB, 8_MiB, 12_MiB, 16_MiB}, {1, 2, 3, 4}));
  const Where relu{.op = "aten::relu"}, add{.op = "aten::add"};

  find_referrers({{"variable 'x' in train.py", relu},
                  {"list 'history' in train.py", relu},
                  {"list 'history' in train.py", relu},
                  {"list 'others' in train.py", add},
                  {"list 'others' in train.py", add},
                  {"list 'others' in train.py", add}},
                 growths);

  CHECK(growths[0].referrer == "list 'history' in train.py");
}

TEST_CASE("a container that has most of what a search came to before it was cut short keeps the growth",
          "[explain][growth]") {
  const Where frame{.op = "aten::rand", .source = "dqn.py:11"};
  std::vector<Growth> growths{{.kind = GrowthKind::kept_tensors, .places = {{.where = frame, .blocks = 60'000}}}};
  const std::vector<Referrer> found(20, {.variable = "deque 'buffer' in dqn.py", .made = frame});
  find_referrers(found, growths);
  CHECK(growths[0].referrer.empty());
  find_referrers(found, growths, false);
  CHECK(growths[0].referrer == "deque 'buffer' in dqn.py");
}

TEST_CASE("a graph that grows is kept by the variable with most of its nodes", "[explain][growth]") {
  std::vector<Growth> growths{{.kind = GrowthKind::retained_graph}};

  find_referrers({{.variable = "list 'plain' in train.py"},
                  {.variable = "variable 'loss' in train.py", .nodes = 12},
                  {.variable = "variable 'total' in train.py", .nodes = 300}},
                 growths);

  CHECK(growths[0].referrer == "variable 'total' in train.py");
}

TEST_CASE("a variable that leads to one step only does not keep the graphs of all", "[explain][growth]") {
  std::vector<Growth> growths{{.kind = GrowthKind::retained_graph, .first_step = 1, .last_step = 14, .place_count = 3}};
  find_referrers({{.variable = "variable 'loss' in train.py", .nodes = 16}}, growths);
  CHECK(growths[0].referrer.empty());
  find_referrers({{.variable = "variable 'total' in train.py", .nodes = 40}}, growths);
  CHECK(growths[0].referrer == "variable 'total' in train.py");
}

TEST_CASE("a graph of the newest steps keeps nothing of those before, however many nodes it has", "[explain][growth]") {
  std::vector<Growth> growths{{.kind = GrowthKind::retained_graph, .first_step = 1, .last_step = 14, .place_count = 3}};
  find_referrers({{.variable = "variable 'output' in train.py", .nodes = 400, .of_newest_steps = true}}, growths);
  CHECK(growths[0].referrer.empty());
}

TEST_CASE("of detached tensors that grow the largest is named, as none keeps the others", "[explain][growth]") {
  const Where large{.op = "aten::abs", .source = "a.py:5"}, last{.op = "aten::sum", .source = "a.py:6"};
  std::vector<Growth> growths{{.kind = GrowthKind::retained_graph,
                               .grown_bytes = 4_MiB,
                               .held = last,
                               .places = {{.where = large, .blocks = 4}, {.where = last, .blocks = 4}},
                               .place_count = 2}};
  const Referrer image{.variable = "list 'images' in a.py", .made = large, .bytes = 1_MiB, .storage_bytes = 1_MiB};
  find_referrers({image, image, image, image}, growths);
  CHECK(growths[0].kind == GrowthKind::kept_tensors);
  CHECK(growths[0].held == large);
}

TEST_CASE("tensors that a container has itself no graph of a variable keeps", "[explain][growth]") {
  const Where screen{.op = "aten::sub", .source = "dqn.py:7"};
  std::vector<Growth> growths{{.kind = GrowthKind::retained_graph,
                               .grown_bytes = 4_MiB,
                               .first_step = 1,
                               .last_step = 4,
                               .places = {{.where = screen, .blocks = 4}},
                               .place_count = 1}};
  std::vector<Referrer> referrers{{.variable = "variable 'q' in train.py", .nodes = 29}};
  for (int i = 0; i < 4; ++i) {
    referrers.push_back(
        {.variable = "deque 'memory' in train.py", .made = screen, .bytes = 1_MiB, .storage_bytes = 1_MiB});
  }
  find_referrers(referrers, growths);
  CHECK(growths[0].referrer == "deque 'memory' in train.py");
}

TEST_CASE("of gradients and parameters that grow alike those stand first that a variable leads to",
          "[explain][growth]") {
  const Where gradient{.node = "AddmmBackward0", .op = "aten::linear"}, weight{.op = "aten::to", .source = "a.py:7"};
  std::vector<Growth> growths(2);
  growths[0] = {.bytes_per_step = 9_MiB, .held = gradient, .places = {{.where = gradient, .blocks = 2}}};
  growths[1] = {.bytes_per_step = 9_MiB, .held = weight, .places = {{.where = weight, .blocks = 2}}};
  const Referrer trial{
      .variable = "dict 'study.trials[0]._parameters' in a.py", .made = weight, .storage_bytes = 1_MiB};
  find_referrers({trial, trial}, growths);
  CHECK(growths.front().held == weight);
  CHECK_FALSE(growths.front().referrer.empty());
  growths.back().bytes_per_step = 10_MiB;
  find_referrers({trial, trial}, growths);
  CHECK(growths.front().held == gradient);
}

}  // namespace oomdiag
