#include <map>
#include <string>
#include <vector>

#include "profiler/replay/evidence/graphs.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

std::string state(int cell) { return "h" + std::to_string(cell); }
std::string node_of(int cell) { return "TanhBackward" + std::to_string(cell); }

/// A recurrent network: the same line runs once for each of `cells`, and each cell's node keeps that cell's output. The
/// nodes have a name of their own where `distinct`.
struct Recurrent {
  int cells = 3;
  bool distinct = true;

  void forward(EventBuilder& trace, uint64_t first_node) const {
    for (int cell = 0; cell < cells; ++cell) {
      trace.op({.op = "aten::tanh", .module = "cell", .source = "rnn.py:7"}).alloc(state(cell), 1_KiB);
      trace.nodes(first_node + static_cast<uint64_t>(cell));
    }
  }
  void backward(EventBuilder& trace, uint64_t first_node) const {
    trace.node("SumBackward0", first_node + static_cast<uint64_t>(cells)).walk();
    for (int cell = cells; cell-- > 0;) {
      trace.saved(state(cell), distinct ? node_of(cell) : "TanhBackward0", first_node + static_cast<uint64_t>(cell));
    }
    trace.alloc("gradient", 1_KiB);
    for (int cell = cells; cell-- > 0;) trace.free(state(cell));
    trace.free("gradient").end_node();
  }
  void step(EventBuilder& trace, uint64_t first_node) const {
    forward(trace, first_node);
    backward(trace, first_node);
    trace.begin_scope("Optimizer.step#SGD.step").end_scope("Optimizer.step#SGD.step");
  }
};

/// By cell, the names of the nodes that keep its output where the last pass ran out of memory.
std::map<int, std::vector<std::string>> nodes_by_cell(const EventBuilder& trace, int cells) {
  const Trace& built = trace;
  const MemoryState found = replay(built).devices.at(0).state;
  std::map<int, std::vector<std::string>> result;
  for (const LiveBlock& block : found.blocks) {
    for (int cell = 0; cell < cells; ++cell) {
      if (block.address != trace.address_of(state(cell))) continue;
      for (const Where& where : block.saved_by) result[cell].emplace_back(where.node);
    }
  }
  return result;
}

using Nodes = std::vector<std::string>;

}  // namespace

TEST_CASE("each of the allocations that one line makes in a loop is kept by its own node", "[replay]") {
  EventBuilder trace;
  const Recurrent network;
  network.step(trace, 0);
  network.forward(trace, 10);
  trace.oom(64_GiB).op_failed();

  CHECK(nodes_by_cell(trace, 3) == std::map<int, Nodes>{{0, {node_of(0)}}, {1, {node_of(1)}}, {2, {node_of(2)}}});
}

TEST_CASE("where the graph is as it was at the OOM before, what was found then counts", "[replay]") {
  EventBuilder trace;
  const Recurrent network{.cells = 1};
  network.forward(trace, 0);
  trace.oom(64_GiB).walk().saved(state(0), node_of(0), 0).op_failed();
  trace.op({.op = "aten::empty"}).oom(64_GiB).walk(kGraphUnchanged).op_failed();

  CHECK(nodes_by_cell(trace, 1) == std::map<int, Nodes>{{0, {node_of(0)}}});
}

TEST_CASE("a longer loop than the one whose graph was traversed is kept by nodes like the last one", "[replay]") {
  EventBuilder trace;
  Recurrent{.cells = 2}.step(trace, 0);
  Recurrent{.cells = 4}.forward(trace, 10);
  trace.oom(64_GiB).op_failed();

  CHECK(nodes_by_cell(trace, 4) ==
        std::map<int, Nodes>{{0, {node_of(0)}}, {1, {node_of(1)}}, {2, {node_of(1)}}, {3, {node_of(1)}}});
}

TEST_CASE("where a loop saves every second of its tensors, the others are kept by no node", "[replay]") {
  EventBuilder trace;
  const Recurrent network{.cells = 4};
  network.forward(trace, 0);
  trace.node("SumBackward0", 4).walk().saved(state(1), node_of(1), 1).saved(state(3), node_of(3), 3);
  trace.alloc("gradient", 1_KiB);
  for (int cell = 0; cell < 4; ++cell) trace.free(state(cell));
  trace.free("gradient").end_node();
  network.forward(trace, 10);
  trace.oom(64_GiB).op_failed();

  CHECK(nodes_by_cell(trace, 4) == std::map<int, Nodes>{{1, {node_of(1)}}, {3, {node_of(3)}}});
}

TEST_CASE("each micro-batch is like the one whose graph was traversed", "[replay]") {
  EventBuilder trace;
  const Recurrent network;
  network.forward(trace, 0);
  network.backward(trace, 0);
  network.forward(trace, 10);  // of the same step
  trace.oom(64_GiB).op_failed();

  CHECK(nodes_by_cell(trace, 3) == std::map<int, Nodes>{{0, {node_of(0)}}, {1, {node_of(1)}}, {2, {node_of(2)}}});
}

TEST_CASE("20 000 allocations of one line have 20 000 saving nodes, not as many each", "[replay]") {
  EventBuilder trace;
  const Recurrent network{.cells = 20'000, .distinct = false};
  network.step(trace, 0);
  network.forward(trace, 30'000);
  trace.oom(64_GiB).op_failed();

  const History history = replay(trace);
  const DeviceHistory& device = history.devices.at(0);
  const auto count = [](const auto& blocks) {
    size_t nodes = 0;
    for (const auto& block : blocks) nodes += block.saved_by.size();
    return nodes;
  };
  CHECK(device.state.saved_from_earlier_step);
  CHECK(count(device.state.blocks) == 20'000);
  CHECK(count(device.step_allocations.blocks) == 20'000);
  CHECK(count(device.complete.blocks) == 20'000);
}

TEST_CASE("the same place on two devices has saving nodes of its own on each", "[replay]") {
  EventBuilder trace;
  const auto forward = [&](uint64_t first_node) {
    for (const uint8_t device : {uint8_t{0}, uint8_t{1}}) {
      trace.device(device).op({.op = "aten::tanh", .source = "rnn.py:7"}).alloc(state(device), 1_KiB);
      trace.nodes(first_node + device);
    }
  };
  forward(0);
  trace.node("SumBackward0", 2).walk().device(0).saved(state(0), node_of(0), 0);
  trace.device(1).saved(state(1), node_of(1), 1).alloc("gradient", 1_KiB).free(state(1)).free("gradient");
  trace.device(0).free(state(0)).end_node();
  forward(10);
  trace.device(0).oom(64_GiB).op_failed();

  CHECK(nodes_by_cell(trace, 1) == std::map<int, Nodes>{{0, {node_of(0)}}});
}

}  // namespace oomdiag
