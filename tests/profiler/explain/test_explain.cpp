#include "profiler/explain/batch.h"
#include "profiler/explain/explain.h"
#include "profiler/replay/replay.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

/// A GPU with this much of everything and a request that failed.
struct FailedRequest {
  int64_t requested = 0, free = 0, cached = 0, allocated = 0, pending = 0, outside = 0;

  MemoryState state() const {
    MemoryState state;
    state.allocated_bytes = allocated;
    state.pending_free_bytes = pending;
    state.reserved_bytes = allocated + pending + cached;
    state.non_pytorch_bytes = outside;
    state.free_bytes = free;
    return state;
  }
  int64_t total() const { return free + cached + allocated + pending + outside; }
};

Cause cause_of(const FailedRequest& situation, const AllocatorSettings& settings = {}, int64_t context_bytes = 0,
               OutOfMemory failure = {}) {
  failure.requested_bytes = situation.requested;
  return find_cause(failure, situation.state(), settings, gpu_of(situation.total(), context_bytes));
}

}  // namespace

TEST_CASE("capacity: bytes are missing even if every cached one could be used", "[explain]") {
  const Cause cause = cause_of({.requested = 1_GiB, .free = 500_MiB, .cached = 300_MiB, .allocated = 8_GiB});

  CHECK(cause.kind == CauseKind::capacity);
  CHECK(cause.short_by_bytes == 1_GiB - 800_MiB);
}

TEST_CASE("fragmentation: free and cached bytes are enough, but no free block is", "[explain]") {
  const Cause cause = cause_of({.requested = 1_GiB, .free = 500_MiB, .cached = 600_MiB, .allocated = 8_GiB});

  CHECK(cause.kind == CauseKind::fragmentation);
  CHECK(cause.short_by_bytes == 0);
}

TEST_CASE("a loop that keeps each of its results would ask for the next one, however they are packed", "[explain]") {
  const FailedRequest failed{.requested = 1_GiB, .free = 500_MiB, .cached = 600_MiB, .allocated = 8_GiB};
  const OutOfMemory failure{
      .phase = Phase::other, .where = {.op = "aten::conv2d", .source = "a.py:3"}, .requested_bytes = 1_GiB};
  const auto kind = [&](size_t kept, int64_t cached = 600_MiB) {
    FailedRequest failed_request = failed;
    failed_request.cached = cached;
    MemoryState state = failed_request.state();
    state.blocks.assign(kept, {.bytes = 1_GiB, .made = failure.where});
    return find_cause(failure, state, {}, gpu_of(failed_request.total())).kind;
  };
  CHECK(kind(3) == CauseKind::fragmentation);
  CHECK(kind(8) == CauseKind::capacity);
  CHECK(kind(8, 3_GiB) == CauseKind::fragmentation);  // a quarter more of its turns would fit
}

TEST_CASE("a pass without a graph goes on, too: pieces are the reason where they would have served the request",
          "[explain]") {
  const auto kind = [](int64_t free, int64_t cached, std::vector<LiveBlock> kept = {}) {
    const FailedRequest failed_request{.requested = 1_GiB, .free = free, .cached = cached, .allocated = 8_GiB};
    MemoryState state = failed_request.state();
    state.blocks = std::move(kept);
    const OutOfMemory failure{.step = 5, .phase = Phase::forward, .requested_bytes = 1_GiB};
    return find_cause(failure, state, {}, gpu_of(failed_request.total())).kind;
  };
  CHECK(kind(900_MiB, 300_MiB) == CauseKind::capacity);
  CHECK(kind(100_MiB, 1100_MiB) == CauseKind::fragmentation);
  // A loop that keeps its results is at its end, however they are packed.
  const LiveBlock result{
      .bytes = 1_GiB, .category = Category::output, .made = {.op = "aten::relu", .source = "a.py:2"}};
  CHECK(kind(100_MiB, 1100_MiB, std::vector<LiveBlock>(6, result)) == CauseKind::capacity);
}

TEST_CASE("it is capacity where forward saves, and what else it will ask for is not known to fit", "[explain]") {
  const auto kind = [](int64_t cached, Phase phase, const StepNeed& need) {
    const FailedRequest failed_request{.requested = 1_GiB, .free = 500_MiB, .cached = cached, .allocated = 8_GiB};
    MemoryState state = failed_request.state();
    state.blocks = {{.bytes = 8_GiB, .category = Category::activation}};
    const OutOfMemory failure{.step = 1, .phase = phase, .requested_bytes = 1_GiB};
    return find_cause(failure, state, {}, gpu_of(failed_request.total()), {}, need).kind;
  };
  CHECK(kind(600_MiB, Phase::forward, {}) == CauseKind::capacity);  // ends one op later
  CHECK(kind(600_MiB, Phase::backward, {}) == CauseKind::fragmentation);
  CHECK(kind(1_GiB + 600_MiB, Phase::forward, {}) == CauseKind::fragmentation);
  CHECK(kind(1_GiB + 600_MiB, Phase::forward, {.more_comes = true}) == CauseKind::capacity);  // modules to come
  const StepNeed too_much{.bytes = 12_GiB, .whole = true}, enough{.bytes = 9_GiB, .whole = true};
  CHECK(kind(600_MiB, Phase::forward, enough) == CauseKind::fragmentation);  // a whole step of this size decides
  CHECK(kind(600_MiB, Phase::forward, too_much) == CauseKind::capacity);
  CHECK(kind(600_MiB, Phase::backward, {.bytes = 12_GiB}) == CauseKind::capacity);  // the optimizer's state is to come
  CHECK(kind(600_MiB, Phase::backward, {.bytes = 9_GiB, .next_bytes = 12_GiB}) == CauseKind::capacity);  // … and stays
  CHECK(kind(600_MiB, Phase::backward, {.bytes = 9_GiB, .next_bytes = 9_GiB}) == CauseKind::fragmentation);
}

TEST_CASE("what the rest of the step lacks is what a request that would fit is short by", "[explain]") {
  const FailedRequest failed_request{.requested = 1_GiB, .free = 500_MiB, .cached = 600_MiB, .allocated = 8_GiB};
  const Cause cause = find_cause({.requested_bytes = 1_GiB}, failed_request.state(), {}, gpu_of(failed_request.total()),
                                 {}, {.bytes = failed_request.total() + 2_GiB});
  CHECK(cause.kind == CauseKind::capacity);
  CHECK(cause.short_by_bytes == 2_GiB);
  CHECK(cause.facts.step == StepNeed{.bytes = failed_request.total() + 2_GiB});
}

TEST_CASE("a cached segment that is wholly free at an OOM is out of reach", "[explain]") {
  const FailedRequest failed_request{
      .requested = 64_MiB, .free = 40_MiB, .cached = 66_MiB, .allocated = 200_MiB, .pending = 640_MiB};
  MemoryState state = failed_request.state();
  const OutOfMemory failure{.requested_bytes = 64_MiB};
  CHECK(find_cause(failure, state, {}, gpu_of(failed_request.total())).kind == CauseKind::fragmentation);
  state.segments = {{.bytes = 64_MiB, .used_bytes = 0, .largest_free_block_bytes = 64_MiB}};
  CHECK(find_cause(failure, state, {}, gpu_of(failed_request.total())).kind == CauseKind::pending_frees);
}

TEST_CASE("what private pools keep in their caches serves nobody else", "[explain]") {
  const FailedRequest failed_request{.requested = 5_GiB, .free = 3_GiB, .cached = 8_GiB, .allocated = 1_GiB};
  MemoryState state = failed_request.state();
  state.segments = {{.bytes = 9_GiB, .used_bytes = 1_GiB, .largest_free_block_bytes = 8_GiB, .pool = 1}};
  OutOfMemory failure{.requested_bytes = 5_GiB};
  const Cause cause = find_cause(failure, state, {}, gpu_of(failed_request.total()));
  CHECK(cause.kind == CauseKind::capacity);
  CHECK(cause.short_by_bytes == 2_GiB);
  CHECK(cause.facts.other_pools_cached_bytes == 8_GiB);
  CHECK(cause.facts.largest_free_block_bytes == 0);

  failure.pool = 1;  // the pool itself asks: it may use all of that
  const Cause own = find_cause(failure, state, {}, gpu_of(failed_request.total()));
  CHECK(own.kind == CauseKind::fragmentation);
  CHECK(own.facts.other_pools_cached_bytes == 0);
}

TEST_CASE("where hardly anything would be left without fragmentation, what the program holds is named first",
          "[explain]") {
  const auto explained = [](int64_t cached) {
    DeviceHistory device;
    device.state = FailedRequest{.requested = 1_GiB, .free = 500_MiB, .cached = cached, .allocated = 8_GiB}.state();
    device.state.blocks = {{.bytes = 8_GiB,
                            .requested_bytes = 8_GiB,
                            .category = Category::input,
                            .made = {.op = "aten::zeros", .source = "storage.py:3"},
                            .shape = "[2048, 1048576] float32"}};
    device.referrers = {{.variable = "attribute 'storage.frames' in main (storage.py:9)",
                         .made = device.state.blocks[0].made,
                         .bytes = 8_GiB,
                         .storage_bytes = 8_GiB}};
    device.failure = OutOfMemory{.phase = Phase::other, .where = {.op = "aten::to"}, .requested_bytes = 1_GiB};
    return explain(device, {.device = gpu_of(8_GiB + 500_MiB + cached)});
  };
  const Findings full = explained(600_MiB);
  CHECK(full.cause->kind == CauseKind::fragmentation);
  CHECK(full.reason->id == "largest_tensor");
  CHECK(full.besides->reason.id == "fragmentation");
  const Findings roomy = explained(1_GiB);
  CHECK(roomy.reason->id == "fragmentation");
  CHECK(roomy.besides->reason.id == "largest_tensor");
}

TEST_CASE("what private pools keep is needed besides, and no fix is said to fit into it", "[explain]") {
  DeviceHistory device;
  device.failure = OutOfMemory{.requested_bytes = 5_GiB};
  MemoryState& state = device.state;
  state = {.allocated_bytes = 1_GiB, .reserved_bytes = 9_GiB, .non_pytorch_bytes = 1_GiB, .free_bytes = 2_GiB};
  state.segments = {{.bytes = 9_GiB, .used_bytes = 1_GiB, .largest_free_block_bytes = 8_GiB, .pool = 1}};
  CHECK(explain(device, {.device = gpu_of(12_GiB)}).required_bytes == 15_GiB);
  CHECK(explain(device, {.device = gpu_of(12_GiB), .batch = 64}).batch->largest_batch ==
        25);  // of 5 GiB, 3 - 1 are left

  device.failure->pool = 1;  // the pool itself asks: it may use all of that
  CHECK(explain(device, {.device = gpu_of(12_GiB)}).required_bytes == 7_GiB);

  device.failure.reset();
  CHECK(explain(device, {.device = gpu_of(12_GiB)}).headroom_bytes == 2_GiB);
}

TEST_CASE("what private pools keep is no headroom for an inferred batch either", "[explain]") {
  DeviceHistory device;
  MemoryState& state = device.state;
  state = {.allocated_bytes = 2_GiB, .reserved_bytes = 10_GiB, .non_pytorch_bytes = 1_GiB, .free_bytes = 1_GiB};
  state.blocks = {{.bytes = 2_GiB, .category = Category::activation, .shape = "[64, 32, 32] float32"}};
  state.segments = {{.bytes = 8_GiB, .used_bytes = 0, .largest_free_block_bytes = 8_GiB, .pool = 1}};
  const Findings findings = explain(device, {.device = gpu_of(12_GiB)});
  REQUIRE(findings.batch);
  CHECK(findings.batch->inferred);
  CHECK(findings.batch->largest_batch == 96);  // 12 - 1 - 8 GiB are 3, and 64 examples take 2
}

TEST_CASE("headroom and the largest batch keep to the fraction of the GPU that the program may take", "[explain]") {
  DeviceHistory device;
  device.state = {.allocated_bytes = 2_GiB, .reserved_bytes = 2_GiB, .non_pytorch_bytes = 1_GiB, .free_bytes = 9_GiB};
  device.state.blocks = {{.bytes = 2_GiB, .category = Category::activation, .shape = "[64, 32, 32] float32"}};
  const Findings findings = explain(device, {.settings = {.memory_fraction = 0.5}, .device = gpu_of(12_GiB)});
  CHECK(findings.headroom_bytes == 4_GiB);
  REQUIRE(findings.batch);
  CHECK(findings.batch->largest_batch <= 192);  // of 6 GiB 64 examples take 2
}

TEST_CASE("what becomes known later is a fact more, and all causes are asked again", "[explain]") {
  const FailureFacts known{.requested_bytes = 1_GiB,
                           .segment_bytes = 1_GiB,
                           .total_bytes = 12_GiB,
                           .free_bytes = 500_MiB,
                           .reserved_bytes = 11_GiB,
                           .cached_bytes = 600_MiB,
                           .usable_cached_bytes = 600_MiB,
                           .allowed_bytes = 12_GiB};
  const auto kind = [](const FailureFacts& facts) { return decide_cause(facts).kind; };
  CHECK(kind(known) == CauseKind::fragmentation);

  FailureFacts complete = known;
  complete.step = {.bytes = 13_GiB, .whole = true};
  CHECK(kind(complete) == CauseKind::capacity);
  complete.imbalance = Imbalance{11_GiB, 2_GiB, 6_GiB};
  CHECK(kind(complete) == CauseKind::imbalance);
  complete.grown_bytes = 2_GiB;
  CHECK(kind(complete) == CauseKind::leak);
}

TEST_CASE("of a device whose size is not known no request is too large, and nobody takes what is missing",
          "[explain]") {
  FailureFacts facts{.requested_bytes = 9_GiB, .segment_bytes = 9_GiB, .total_bytes = 8_GiB, .allowed_bytes = 8_GiB};
  facts.non_pytorch_bytes = 8_GiB;
  CHECK(decide_cause(facts).kind == CauseKind::oversized_request);
  facts.total_is_known = false;
  CHECK(decide_cause(facts).kind == CauseKind::capacity);
  facts.requested_bytes = facts.segment_bytes = 1_GiB;
  CHECK(decide_cause(facts).kind == CauseKind::capacity);
}

TEST_CASE("every row of the causes is found by its kind and name", "[explain]") {
  CHECK(find_cause_row(CauseKind::workspace, "library_allocation").because == "library_allocation");
  CHECK(find_cause_row(CauseKind::workspace, "scratch_space").because == "scratch_space");
  CHECK(find_cause_row(CauseKind::leak, "of another version").because == "short");
}

TEST_CASE("a small request that needs a whole segment looks like fragmentation, and is capacity", "[explain]") {
  const Cause cause = cause_of({.requested = 2_MiB, .free = 6_MiB, .cached = 2_MiB, .allocated = 8_GiB});

  CHECK(cause.kind == CauseKind::capacity);
  CHECK(cause.short_by_bytes == 12_MiB);
  CHECK(cause.facts.segment_bytes == 20_MiB);
}

TEST_CASE("an oversized request fits no GPU of this size", "[explain]") {
  CHECK(cause_of({.requested = 9_GiB, .free = 7_GiB, .allocated = 1_GiB}).kind == CauseKind::oversized_request);
  CHECK(cause_of({.requested = 7_GiB, .free = 6_GiB, .allocated = 2_GiB}).kind == CauseKind::capacity);
}

TEST_CASE("others on the GPU are the cause if it would fit without them", "[explain]") {
  const FailedRequest shared{.requested = 1_GiB, .free = 500_MiB, .allocated = 1_GiB, .outside = 6_GiB};
  CHECK(cause_of(shared).kind == CauseKind::non_pytorch);
  // Without a library's few bytes it would fit, too; but these are not what fills the GPU.
  CHECK(cause_of({.requested = 100_MiB, .free = 50_MiB, .allocated = 6_GiB, .outside = 60_MiB}).kind ==
        CauseKind::capacity);
  CHECK(cause_of(shared, {}, 6_GiB).kind == CauseKind::capacity);  // all of it is the context itself
}

TEST_CASE("a limit that the program set is the cause if the GPU had free memory", "[explain]") {
  const Cause cause = cause_of({.requested = 1_GiB, .free = 5_GiB, .allocated = 4_GiB}, {.memory_fraction = 0.5});

  CHECK(cause.kind == CauseKind::fraction_cap);
  CHECK(cause.short_by_bytes == 512_MiB);
  CHECK(cause.facts.allowed_bytes == 4_GiB + 512_MiB);
}

TEST_CASE("an OOM though the GPU had free memory is the work of a limit, which is not known but bounded", "[explain]") {
  const FailedRequest failed_request{.requested = 1_GiB, .free = 5_GiB, .cached = 3_GiB, .allocated = 4_GiB};
  const Cause cause = cause_of(failed_request);

  CHECK(cause.kind == CauseKind::fraction_cap);
  CHECK(cause.facts.limit_is_inferred);
  CHECK(cause.facts.allowed_bytes == 8_GiB - 1);
  CHECK(cause.short_by_bytes == 0);

  MemoryState state = failed_request.state();
  state.non_pytorch = {{.owner = "process 4711 python", .kind = "process"}};  // it may have freed that a moment before
  const Cause shared = find_cause({.requested_bytes = 1_GiB}, state, {}, gpu_of(failed_request.total()));
  CHECK(shared.kind != CauseKind::fraction_cap);
}

TEST_CASE("an expandable segment grows by 20 MiB: with less free the GPU had too little memory", "[explain]") {
  const FailedRequest failed_request{.requested = 448_MiB, .free = 456_MiB, .allocated = 8_GiB};
  CHECK(cause_of(failed_request, {.expandable_segments = true}).kind == CauseKind::capacity);
  CHECK(cause_of(failed_request).kind == CauseKind::fraction_cap);
}

TEST_CASE("frees that wait for another stream are the cause if they would be enough", "[explain]") {
  CHECK(cause_of({.requested = 1_GiB, .free = 500_MiB, .allocated = 4_GiB, .pending = 600_MiB}).kind ==
        CauseKind::pending_frees);
}

TEST_CASE("a library's scratch space is distinguished from a tensor", "[explain]") {
  const FailedRequest full{.requested = 1_GiB, .free = 500_MiB, .allocated = 8_GiB};
  const OutOfMemory scratch{.where = {.inner = "aten::cudnn_convolution"}, .first_in_op = false};
  const OutOfMemory result{.where = {.inner = "aten::cudnn_convolution"}, .first_in_op = true};
  OutOfMemory gradient = scratch;
  gradient.requested_shape = "[64, 3] float32";

  OutOfMemory product{.where = {.inner = "aten::addmm"}, .first_in_op = false};  // after the casts of its arguments

  CHECK(cause_of(full, {}, 0, product).kind == CauseKind::capacity);
  CHECK(cause_of({.requested = 1_MiB, .free = 0, .allocated = 8_GiB}, {}, 0, product).kind == CauseKind::workspace);
  CHECK(cause_of(full, {}, 0, scratch).kind == CauseKind::workspace);
  CHECK(cause_of(full, {}, 0, result).kind == CauseKind::capacity);
  CHECK(cause_of(full, {}, 0, gradient).kind == CauseKind::capacity);
}

TEST_CASE("fragmentation names the largest free blocks and what blocks them", "[explain]") {
  EventBuilder trace({.gpu_bytes = 100_MiB});
  trace.op({.op = "aten::relu"}).alloc("x", 4).nodes(0);
  for (const char* name : {"a", "b", "c", "d"}) {
    trace.op({.op = "aten::empty", .module = name});
    trace.segment(20_MiB).alloc(std::string(name) + " gone", 16_MiB).alloc(std::string(name) + " stays", 4_MiB);
  }
  for (const char* name : {"a", "b", "c", "d"}) trace.free(std::string(name) + " gone");
  trace.op({.op = "aten::empty", .module = "big"}).oom(50_MiB).op_failed();

  const Trace& built = trace;
  const DeviceHistory device = replay(built).devices.at(0);
  const Findings findings = explain(device, {.device = gpu_of(100_MiB)});
  REQUIRE(findings.cause);
  CHECK(findings.cause->kind == CauseKind::fragmentation);
  REQUIRE(findings.cause->blocked_segments.size() == 5);
  CHECK(findings.cause->blocked_segments[0].largest_free_block_bytes == 16_MiB);
  REQUIRE(findings.cause->blocked_segments[0].blocked_by.size() == 1);
  CHECK(findings.cause->blocked_segments[0].blocked_by[0].made.module == "a");
  CHECK(findings.cause->facts.largest_free_block_bytes == 16_MiB);
  CHECK(findings.packing == Packing{16_MiB + 512, 18_MiB, 82_MiB, 100_MiB});
}

TEST_CASE("load ≤ pack ≤ reserved ≤ total in every scenario", "[explain]") {
  for (const Trace& trace : {training_that_fits(), oom_in_backward(), oom_in_forward(), oom_in_optimizer()}) {
    const DeviceHistory device = replay(trace).devices.at(0);
    const Packing packing = measure_packing(device.state, trace.devices[0].total_bytes);
    CHECK(packing.load_bytes <= packing.pack_bytes);
    CHECK(packing.pack_bytes <= packing.reserved_bytes);
    CHECK(packing.reserved_bytes <= packing.total_bytes);
  }
}

namespace {

MemoryState with_blocks(std::vector<std::pair<Category, int64_t>> blocks) {
  MemoryState state;
  for (const auto& [category, bytes] : blocks) {
    state.blocks.push_back({.bytes = bytes, .category = category, .shape = "[1] float32"});
    state.allocated_bytes += bytes;
  }
  state.reserved_bytes = state.allocated_bytes;
  return state;
}

}  // namespace

TEST_CASE("the batch model keeps parameters and scales activations", "[explain]") {
  const MemoryState state =
      with_blocks({{Category::parameter, 1_GiB}, {Category::activation, 2_GiB}, {Category::input, 2_GiB}});
  const BatchModel model = model_batch(state, 0, 64, 9_GiB);

  CHECK(model.fixed_bytes == 1_GiB);
  CHECK(model.scaling_bytes == 4_GiB);
  CHECK(model.largest_batch == 128);
}

TEST_CASE("the batch model scales the workspaces of convolutions and keeps those of matrix products", "[explain]") {
  MemoryState state = with_blocks({{Category::workspace, 1_GiB}, {Category::workspace, 2_GiB}});
  state.blocks[0].made.inner = "aten::addmm";
  state.blocks[1].made.inner = "aten::cudnn_convolution";

  CHECK(model_batch(state, 0, 64, 9_GiB).fixed_bytes == 1_GiB);
  CHECK(model_batch(state, 0, 64, 9_GiB).scaling_bytes == 2_GiB);
}

TEST_CASE("the batch model keeps what an optimizer's step makes, which is as large as the weights", "[explain]") {
  MemoryState state = with_blocks({{Category::temporary, 1_GiB}, {Category::activation, 2_GiB}});
  state.blocks[0].phase = Phase::optimizer;
  CHECK(model_batch(state, 0, 64, 9_GiB).scaling_bytes == 2_GiB);
}

TEST_CASE("a batch that failed is not said to fit", "[explain]") {
  const MemoryState state = with_blocks({{Category::activation, 2_GiB}});
  CHECK(model_batch(state, 1_MiB, 64, 9_GiB).largest_batch == 63);
}

TEST_CASE("where nothing scales, no larger batch is predicted", "[explain]") {
  CHECK(model_batch(with_blocks({{Category::parameter, 4_GiB}}), 0, 64, 8_GiB).largest_batch == 0);
}

}  // namespace oomdiag
