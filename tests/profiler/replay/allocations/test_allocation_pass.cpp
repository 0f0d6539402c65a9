#include <algorithm>
#include <random>
#include <set>

#include "profiler/explain/step/what_if.h"
#include "profiler/replay/allocations/live_set.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

uint32_t add(AllocationTable& table, int64_t bytes, uint64_t born = 0, uint64_t died = kNoEvent) {
  const uint32_t id = table.add(0);
  table[id].bytes = bytes;
  table[id].born = born;
  table[id].died = died;
  return id;
}

}  // namespace

TEST_CASE("the lives of a step reach the peak of its GPU, in every scenario", "[replay]") {
  for (const Trace& trace : {training_that_fits(), oom_in_backward(), oom_in_forward(), oom_in_optimizer()}) {
    const DeviceHistory device = replay(trace).devices.at(0);
    const int64_t requested = device.failure ? device.failure->requested_bytes : 0;

    CHECK(find_peak(device.step_allocations.blocks) == device.state.allocated_bytes + requested);
  }
}

TEST_CASE("a block is the same in the moment and in the step: the rules exist once", "[replay]") {
  for (const Trace& trace : {training_that_fits(), oom_in_backward(), oom_in_forward(), oom_in_optimizer()}) {
    const DeviceHistory device = replay(trace).devices.at(0);
    for (const LiveBlock& live : device.state.blocks) {
      const auto same = [&](const StepAllocation& life) {
        return life.made == live.made && life.bytes == live.bytes && life.category == live.category;
      };
      CHECK(std::any_of(device.step_allocations.blocks.begin(), device.step_allocations.blocks.end(), same));
    }
  }
}

TEST_CASE("after an OOM the step before it is known as a whole", "[replay]") {
  EventBuilder trace({.gpu_bytes = 700_MiB});
  const SmallTraining training;
  training.setup(trace);
  for (const uint64_t node : {0u, 3u}) {
    training.forward(trace, node);
    training.backward(trace, node);
    training.optimizer(trace, node == 0);
    training.zero_grad(trace);
  }
  trace.op({.op = "aten::conv2d", .module = "conv1"}).nodes(6).oom(600_MiB).op_failed();

  const DeviceHistory device = replay(trace).devices.at(0);
  REQUIRE(device.failure);
  CHECK(device.step_allocations.step == 3);
  CHECK(device.complete.step == 2);
  CHECK(find_peak(device.complete.blocks) == device.peak.allocated_bytes);
}

TEST_CASE("the rows of blocks that are gone are used again, unless a view holds them", "[replay]") {
  AllocationTable table;
  HeldAllocations view;
  const uint32_t held = add(table, 1);
  view.add(held, table);
  table.detach(held);
  for (int i = 0; i < 1000; ++i) table.detach(add(table, 2));
  CHECK(table[held].bytes == 1);
  CHECK(add(table, 3) <= 2);

  view.drop_all(table);
  CHECK(add(table, 4) == held);
}

TEST_CASE("of a step of very many blocks those that live at its high points are kept", "[replay]") {
  AllocationTable table;
  const Graphs graphs;
  StepCollector step;
  step.begin(1, 0, 0, table, graphs);
  const uint64_t blocks = 3 * StepCollector::kMaxAllocations;
  for (uint64_t i = 0; i < blocks; ++i) {
    const bool highest = i == blocks / 2;
    const uint32_t id = add(table, highest ? 99 : 1, 2 * i);
    step.add(2 * i, table[id].bytes, table);
    table[id].died = 2 * i + 1;
    step.note_end(id, table);
    table.detach(id);
  }
  step.end({}, table);

  const std::vector<uint32_t> kept = step.allocations(0, table);
  CHECK(kept.size() < StepCollector::kMaxAllocations);
  const auto is_highest = [&](uint32_t id) { return table[id].bytes == 99; };
  CHECK(std::any_of(kept.begin(), kept.end(), is_highest));
}

TEST_CASE("of a step of very many blocks all that lived at its peak are kept, in few rows", "[replay]") {
  std::mt19937 random(5);
  AllocationTable table;
  const Graphs graphs;
  StepCollector step;
  step.begin(1, 0, 0, table, graphs);
  std::vector<uint32_t> living, numbers_at_peak;
  int64_t bytes = 0, peak = 0;
  uint32_t rows = 0;
  uint64_t event = 0;
  for (size_t made = 0; made < 4 * StepCollector::kMaxAllocations; ++event) {
    if (living.size() < random() % 400) {
      const uint32_t id = add(table, static_cast<int64_t>(random() % 1000), event);
      living.push_back(id);
      bytes += table[id].bytes;
      rows = std::max(rows, id + 1);
      ++made;
      step.add(event, bytes, table);
    } else if (!living.empty()) {
      std::swap(living[random() % living.size()], living.back());
      const uint32_t id = living.back();
      living.pop_back();
      bytes -= table[id].bytes;
      table[id].died = event;
      step.note_end(id, table);
      table.detach(id);
    }
    if (bytes <= peak) continue;
    peak = bytes;
    numbers_at_peak.clear();
    for (const uint32_t id : living) numbers_at_peak.push_back(table[id].number);
  }
  step.end({}, table);

  std::set<uint32_t> kept;
  for (const uint32_t id : step.allocations(0, table)) kept.insert(table[id].number);
  CHECK(std::all_of(numbers_at_peak.begin(), numbers_at_peak.end(),
                    [&](uint32_t number) { return kept.contains(number); }));
  CHECK(kept.size() <= StepCollector::kMaxAllocations / 2);
  CHECK(rows <= StepCollector::kMaxAllocations + 1000);
}

TEST_CASE("a step that is not asked for holds nothing", "[replay]") {
  AllocationTable table;
  const Graphs graphs;
  StepCollector step;
  for (uint32_t n = 1; n <= 100; ++n) {
    step.begin(n, n, 0, table, graphs);
    const uint32_t id = add(table, 1, n, n);
    CHECK(id == 0);
    step.note_end(id, table);
    table.detach(id);
    step.end({}, table);
    step.drop(table);
  }
}

}  // namespace oomdiag
