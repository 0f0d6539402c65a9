#include "profiler/replay/evidence/join.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/event_builder.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

Event nodes_created(uint64_t first, int64_t count, uint32_t context, uint16_t thread = 1) {
  return {.bytes = count,
          .node_sequence = first,
          .context = context,
          .node_thread = thread,
          .kind = EventKind::nodes_created};
}

const LiveBlock* find(const MemoryState& state, uint64_t address) {
  for (const LiveBlock& block : state.blocks) {
    if (block.address == address) return &block;
  }
  return nullptr;
}

}  // namespace

TEST_CASE("a node is found by its thread and number", "[replay]") {
  NodeTable nodes;
  nodes.add(nodes_created(0, 3, 7));
  nodes.add(nodes_created(3, 1, 8));
  nodes.add(nodes_created(0, 1, 9, 2));

  CHECK(nodes.find(1, 2)->context == 7);
  CHECK(nodes.find(1, 3)->context == 8);
  CHECK(nodes.find(2, 0)->context == 9);
  CHECK_FALSE(nodes.find(1, 4));
  CHECK_FALSE(nodes.find(3, 0));
  CHECK_FALSE(nodes.find(1, kAccumulateGrad));
}

TEST_CASE("where node numbers recur the newest op wins", "[replay]") {
  NodeTable nodes;
  nodes.add(nodes_created(0, 10, 7));
  nodes.add(nodes_created(4, 2, 8));

  CHECK(nodes.find(1, 3)->context == 7);
  CHECK(nodes.find(1, 5)->context == 8);
  CHECK_FALSE(nodes.find(1, 6));
}

TEST_CASE("absurd counts of nodes are no trouble", "[replay]") {
  NodeTable nodes;
  nodes.add(nodes_created(5, INT64_MAX, 7));
  nodes.add(nodes_created(kNoNode - 1, 100, 8));
  nodes.add(nodes_created(kAccumulateGrad, 1, 9));
  nodes.add(nodes_created(9, -1, 9));

  CHECK(nodes.find(1, 6)->context == 7);
  CHECK_FALSE(nodes.find(1, kNoNode));
}

TEST_CASE("a backward block knows the forward op that made its node, before or after that op's allocation",
          "[replay]") {
  const bool nodes_first = GENERATE(false, true);
  EventBuilder trace;
  trace.op({.op = "aten::relu", .module = "relu1", .source = "train.py:3"});
  if (nodes_first) trace.nodes(5).alloc("y", 4_MiB);
  if (!nodes_first) trace.alloc("y", 4_MiB).nodes(5);
  trace.thread(2).node("ReluBackward0", 5).op({.op = "aten::threshold_backward", .grad = false}).alloc("g", 8_MiB);

  const History history = replay(trace);
  const LiveBlock* gradient = find(history.devices.at(0).state, trace.address_of("g"));
  REQUIRE(gradient != nullptr);
  CHECK(gradient->made == Where{.node = "ReluBackward0",
                                .op = "aten::relu",
                                .inner = "aten::threshold_backward",
                                .module = "relu1",
                                .source = "train.py:3"});
  CHECK(history.devices.at(0).attribution == Attribution{.backward_bytes = 8_MiB,
                                                         .with_node_bytes = 8_MiB,
                                                         .with_forward_op_bytes = 8_MiB,
                                                         .with_module_bytes = 8_MiB,
                                                         .with_source_bytes = 8_MiB});
}

TEST_CASE("what a checkpoint computes again belongs to the op that runs again", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::mul", .module = "outer", .source = "train.py:3"}).alloc("y", 1_MiB).nodes(0);
  trace.node("CheckpointFunctionBackward", 0).op({.op = "aten::relu", .module = "inner"}).alloc("again", 4_MiB);
  trace.nodes(7);

  const History history = replay(trace);
  const LiveBlock* again = find(history.devices.at(0).state, trace.address_of("again"));
  REQUIRE(again != nullptr);
  CHECK(again->made.op == "aten::relu");
  CHECK(again->made.module == "inner");
  CHECK(again->made.source == "train.py:3");
  CHECK(again->category == Category::activation);
  CHECK(again->phase == Phase::backward);
}

TEST_CASE("a node of an op that ran again has the line of the call that was checkpointed", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::mul", .source = "train.py:3"}).alloc("y", 1_MiB).nodes(0);
  trace.node("CheckpointFunctionBackward", 0).op({.op = "aten::relu", .module = "inner"}).nodes(7).made_by_node(0);
  trace.node("ReluBackward0", 7).op({.op = "aten::threshold_backward", .grad = false}).alloc("g", 4_MiB);

  const History history = replay(trace);
  const LiveBlock* gradient = find(history.devices.at(0).state, trace.address_of("g"));
  REQUIRE(gradient != nullptr);
  CHECK(gradient->made.op == "aten::relu");
  CHECK(gradient->made.module == "inner");
  CHECK(gradient->made.source == "train.py:3");
}

TEST_CASE("gradient accumulation has no forward op and is counted apart", "[replay]") {
  EventBuilder trace;
  trace.op({.op = "aten::mm"}).alloc("y", 1_MiB).nodes(0);
  trace.node("torch::autograd::AccumulateGrad", kAccumulateGrad).op({.op = "aten::clone", .grad = false});
  trace.alloc("g", 2_MiB);

  CHECK(replay(trace).devices.at(0).attribution ==
        Attribution{.backward_bytes = 2_MiB, .with_node_bytes = 2_MiB, .accumulate_bytes = 2_MiB});
}

}  // namespace oomdiag
