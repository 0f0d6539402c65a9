#include <map>
#include <string>

#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

namespace oomdiag {
namespace {

enum class Backward : bool { frees_graph, retains_graph };

/// Two layers, their backward, and a request in the forward that follows, at which the graph is walked.
void run_out_of_memory(EventBuilder& trace, Backward backward) {
  trace.op({.op = "aten::gelu", .module = "0", .source = "net.py:3"}).alloc("first", 1_MiB).nodes(1);
  trace.op({.op = "aten::gelu", .module = "1", .source = "net.py:4"}).alloc("second", 1_MiB).nodes(2);
  trace.no_op().walk().saved("first", "GeluBackward0", 1).saved("second", "GeluBackward0", 2);
  for (const auto& [block, sequence] : {std::pair("second", 2), std::pair("first", 1)}) {
    trace.node("GeluBackward0", static_cast<uint64_t>(sequence)).alloc("gradient", 1_MiB).free("gradient").end_node();
    if (backward == Backward::frees_graph) trace.free(block);
  }
  trace.op({.op = "aten::gelu", .module = "0", .source = "net.py:3"}).alloc("third", 1_MiB).nodes(3);
  trace.op({.op = "aten::gelu", .module = "1", .source = "net.py:4"}).oom(256_MiB).walk();
  if (backward == Backward::retains_graph) trace.saved("first", "GeluBackward0", 1).saved("second", "GeluBackward0", 2);
  trace.saved("third", "GeluBackward0", 3).op_failed();
}

/// Whether backward has run through what keeps the block.
std::map<std::string, bool> runs_by_block(EventBuilder& trace) {
  const Trace& built = trace;
  const MemoryState state = replay(built, false).devices.at(0).state;
  std::map<std::string, bool> runs;
  for (const LiveBlock& block : state.blocks) {
    for (const char* const name : {"first", "second", "third"}) {
      if (block.address == trace.address_of(name)) runs[name] = block.backward_ran;
    }
  }
  return runs;
}

}  // namespace

TEST_CASE("what a graph keeps behind its backward is marked, and what waits for one is not", "[replay]") {
  EventBuilder trace({.gpu_bytes = 128_MiB});
  run_out_of_memory(trace, Backward::retains_graph);
  CHECK(runs_by_block(trace) == std::map<std::string, bool>{{"first", true}, {"second", true}, {"third", false}});
}

TEST_CASE("a graph that backward freed leaves nothing to mark", "[replay]") {
  EventBuilder trace({.gpu_bytes = 128_MiB});
  run_out_of_memory(trace, Backward::frees_graph);
  const std::map<std::string, bool> runs = runs_by_block(trace);
  CHECK_FALSE(runs.at("third"));
  for (const auto& [block, ran] : runs) CHECK_FALSE(ran);
}

TEST_CASE("what a node keeps that runs as memory runs out is still in use", "[replay]") {
  EventBuilder trace({.gpu_bytes = 128_MiB});
  trace.op({.op = "aten::gelu", .module = "0", .source = "net.py:3"}).alloc("first", 1_MiB).nodes(1);
  trace.no_op().walk().saved("first", "GeluBackward0", 1);
  trace.node("GeluBackward0", 1)
      .alloc("gradient", 1_MiB)
      .oom(256_MiB)
      .walk()
      .saved("first", "GeluBackward0", 1)
      .op_failed();
  const Trace& built = trace;
  const MemoryState state = replay(built, false).devices.at(0).state;
  REQUIRE(state.blocks.size() == 2);
  for (const LiveBlock& block : state.blocks) CHECK_FALSE(block.backward_ran);
}

}  // namespace oomdiag
