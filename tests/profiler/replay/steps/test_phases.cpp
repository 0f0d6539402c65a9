#include "profiler/replay/replay.h"
#include "profiler/replay/steps/phases.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

struct At {
  uint32_t step;
  Phase phase;
  bool operator==(const At&) const = default;
};

/// Step and phase of the last allocation of `trace`.
At last_alloc(const Trace& trace) {
  const Outline outline = read_outline(trace, {});
  Phases phases(trace, outline);
  At at{0, Phase::other};
  for (uint64_t i = 0; i < trace.events.size(); ++i) {
    phases.advance(trace.events[i], i);
    if (trace.events[i].kind == EventKind::alloc) at = {phases.step(), phases.phase_of(trace.events[i])};
  }
  return at;
}

}  // namespace

TEST_CASE("before the first forward op everything is setup", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::to"}).alloc("weight", 4_MiB);
  CHECK(last_alloc(trace) == At{0, Phase::setup});

  trace.nodes(0);  // moving a parameter makes a node too
  CHECK(last_alloc(trace) == At{0, Phase::setup});
}

TEST_CASE("the first forward op begins step 1 with its first allocation, though it names its nodes later", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::to"}).alloc("weight", 4_MiB).op({.op = "aten::conv2d"}).alloc("y", 4_MiB);
  CHECK(last_alloc(trace) == At{0, Phase::setup});

  trace.nodes(0);
  CHECK(last_alloc(trace) == At{1, Phase::forward});
}

TEST_CASE("what the module computed before its first op with a graph is forward, what ran before it is setup",
          "[replay]") {
  for (const auto& [module, peak_of_setup] : {std::pair{"convs.0", 4_MiB}, std::pair{"", 12_MiB}}) {
    EventBuilder trace;
    trace.op({.op = "aten::to"}).alloc("weight", 4_MiB);
    trace.op({.op = "aten::cat", .module = module}).alloc("edges", 8_MiB);
    trace.op({.op = "aten::linear", .module = "convs.0"}).alloc("y", 4_MiB).nodes(0);
    const std::vector<PhasePeak> phases = replay(trace).devices.at(0).phases;
    CHECK(phases.at(0) == PhasePeak{0, Phase::setup, peak_of_setup});
    CHECK(phases.at(1) == PhasePeak{1, Phase::forward, 16_MiB});
  }
}

TEST_CASE("an autograd node is backward, also when it computes forward again", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).nodes(0).node("ReluBackward0", 0);
  trace.op({.op = "aten::threshold_backward", .grad = false}).alloc("g", 4_MiB);
  CHECK(last_alloc(trace) == At{1, Phase::backward});

  trace.op({.op = "aten::relu", .grad = true}).alloc("again", 4_MiB);
  CHECK(last_alloc(trace) == At{1, Phase::backward});
}

TEST_CASE("a step ends where its optimizer scope ends", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).nodes(0);
  trace.begin_scope("Optimizer.step#Adam.step").op({.op = "aten::zeros_like", .grad = false}).alloc("m", 4_MiB);
  CHECK(last_alloc(trace) == At{1, Phase::optimizer});

  trace.end_scope("Optimizer.step#Adam.step").begin_scope("Optimizer.zero_grad#Adam.zero_grad");
  trace.op({.op = "aten::zeros", .grad = false}).alloc("z", 4_MiB).end_scope("Optimizer.zero_grad#Adam.zero_grad");
  CHECK(last_alloc(trace) == At{2, Phase::other});

  trace.op({.op = "aten::relu"}).alloc("y2", 4_MiB);
  CHECK(last_alloc(trace) == At{2, Phase::forward});
}

TEST_CASE("without optimizer scopes a step ends with its backward pass", "[replay]") {
  EventBuilder trace;
  for (uint64_t step = 0; step < 3; ++step) {
    trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).nodes(step);
    CHECK(last_alloc(trace) == At{static_cast<uint32_t>(step) + 1, Phase::forward});
    trace.thread(2).node("ReluBackward0", step).alloc("g", 4_MiB).end_node().thread(1).free("y").free("g");
    CHECK(last_alloc(trace) == At{static_cast<uint32_t>(step) + 1, Phase::backward});
  }
}

TEST_CASE("work without gradients is forward in a module or while the forward pass is open, else other", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::relu"}).alloc("y", 4_MiB).nodes(0);
  trace.op({.op = "aten::argmax", .grad = false}).alloc("a", 4_MiB);
  CHECK(last_alloc(trace) == At{1, Phase::forward});

  trace.node("ReluBackward0", 0).alloc("g", 4_MiB).end_node();
  trace.op({.op = "aten::argmax", .grad = false}).alloc("b", 4_MiB);
  CHECK(last_alloc(trace) == At{1, Phase::other});

  trace.op({.op = "aten::linear", .module = "teacher", .grad = false}).alloc("c", 4_MiB);
  CHECK(last_alloc(trace) == At{1, Phase::forward});
}

TEST_CASE("a program that never trains begins its forward work in its first module", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::to", .grad = false}).alloc("w", 4_MiB);
  trace.op({.op = "aten::linear", .module = "fc", .grad = false}).alloc("y", 4_MiB);
  CHECK(last_alloc(trace) == At{1, Phase::forward});
}

TEST_CASE("of a program that never trains each call of its outermost module is a step", "[replay]") {
  EventBuilder trace;
  trace.trace().process.python = true;
  trace.op({.op = "aten::to", .grad = false}).alloc("w", 4_MiB);
  for (uint32_t call = 1; call <= 5; ++call) {
    trace.op({.op = "aten::randn", .grad = false}).alloc("x", 2_MiB);
    for (const char* layer : {"cell", "cell", "fc"}) {  // the cell runs twice in one call
      trace.op({.op = "aten::linear", .module = layer, .grad = false}).alloc("y", 2_MiB);
    }
  }
  CHECK(last_alloc(trace) == At{5, Phase::forward});
}

TEST_CASE("calls with nothing between them are steps, too, but not the layers of a first forward pass", "[replay]") {
  const auto steps_of = [](bool grad) {
    EventBuilder trace;
    trace.trace().process.python = true;
    trace.op({.op = "aten::to", .grad = false}).alloc("w", 4_MiB);
    for (uint32_t call = 1; call <= 5; ++call) {
      trace.op({.op = "aten::linear", .module = "fc", .grad = grad}).alloc("y", 2_MiB);
      if (grad) trace.nodes(call);
    }
    return last_alloc(trace).step;
  };
  CHECK(steps_of(false) == 5);
  CHECK(steps_of(true) == 1);
}

TEST_CASE("a scope that the program opens again and again is a step, where most work lies in it", "[replay]") {
  EventBuilder trace;
  trace.trace().process.python = true;
  for (uint32_t request = 1; request <= 3; ++request) {
    trace.begin_scope("request");
    for (uint32_t token = 0; token < 10; ++token) {
      trace.op({.op = "aten::cat", .grad = false}).alloc("ids", 1_MiB);
      trace.op({.op = "aten::linear", .module = "fc", .grad = false}).alloc("y", 2_MiB);
    }
    CHECK(last_alloc(trace).step == (request == 1 ? 10 : request));  // the first alone: its tokens are all that returns
    trace.end_scope("request");
  }
}

TEST_CASE("with an optimizer iterations are its steps, however often modules are called", "[replay]") {
  EventBuilder trace;
  trace.trace().process.python = true;
  for (uint32_t call = 1; call <= 5; ++call) {
    trace.op({.op = "aten::randn", .grad = false}).alloc("x", 2_MiB);
    trace.op({.op = "aten::linear", .module = "fc", .grad = false}).alloc("y", 2_MiB);
  }
  trace.begin_scope("Optimizer.step#SGD.step").end_scope("Optimizer.step#SGD.step");
  trace.op({.op = "aten::linear", .module = "fc", .grad = false}).alloc("y", 2_MiB);
  CHECK(last_alloc(trace).step == 2);
}

TEST_CASE("scopes that take turns are no steps", "[replay]") {
  EventBuilder trace;
  for (uint32_t turn = 0; turn < 8; ++turn) {
    for (const char* scope : {"kept", "temporary"}) {
      trace.begin_scope(scope).op({.op = "aten::empty", .module = scope, .grad = false}).alloc("x", 2_MiB);
      trace.end_scope(scope);
    }
  }
  CHECK(last_alloc(trace).step == 1);
}

TEST_CASE("each phase of each step has its own peak", "[replay]") {
  const Trace trace = training_that_fits();
  const History history = replay(trace);
  const auto& phases = history.devices.at(0).phases;

  REQUIRE(phases.size() == 7);
  CHECK(phases[0] == PhasePeak{0, Phase::setup, 68_MiB});  // the input is made before the first op that records itself
  CHECK(phases[1].phase == Phase::forward);
  CHECK(phases[2] == PhasePeak{1, Phase::backward, 260_MiB + 512});
  CHECK(phases[3].phase == Phase::optimizer);
  CHECK(phases[5] == PhasePeak{2, Phase::backward, 268_MiB + 512});
  CHECK(history.steps == 3);
}

}  // namespace oomdiag
