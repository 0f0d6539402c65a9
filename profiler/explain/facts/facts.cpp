#include "profiler/explain/facts/facts.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>
#include <tuple>

#include "profiler/explain/facts/growth.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/replay/evidence/categories.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

// When the allocator gives up it has already returned every cached segment that was wholly free, so what is still cached lies
// in free blocks beside blocks in use. A cached segment that is wholly free even so is of a pool that the allocator may not
// touch, as while a CUDA graph is captured: it is not usable; nor is what other pools than that of the request cache.

namespace oomdiag {
namespace {

// A context and the libraries' own memory on a real device, where nothing says how much that is.
constexpr int64_t kUsualContextBytes = kGiB;

// Another process may have freed what was missing a moment before.
bool shares_device(const MemoryState& state) {
  return std::any_of(state.non_pytorch.begin(), state.non_pytorch.end(),
                     [](const NonPytorchOwner& owner) { return owner.kind == "process"; });
}

void read_segments(const MemoryState& state, uint8_t pool, FailureFacts& facts) {
  facts.usable_cached_bytes = facts.cached_bytes;
  for (const SegmentLayout& segment : state.segments) {
    const int64_t cached = segment.bytes - segment.used_bytes;
    const bool serves = segment.pool == pool;
    if (segment.used_bytes == 0) facts.releasable_bytes += segment.bytes;
    if (segment.used_bytes == 0 || !serves) facts.usable_cached_bytes -= cached;
    if (!serves) facts.other_pools_cached_bytes += cached;
    if (serves)
      facts.largest_free_block_bytes = std::max(facts.largest_free_block_bytes, segment.largest_free_block_bytes);
  }
  facts.usable_cached_bytes = std::max<int64_t>(0, facts.usable_cached_bytes);
}

void read_limit(const MemoryState& state, const AllocatorSettings& settings, FailureFacts& facts) {
  facts.allowed_bytes = allowed_bytes(facts.total_bytes, settings.memory_fraction);
  if (settings.memory_fraction >= 1 && facts.free_bytes >= facts.segment_bytes && !shares_device(state)) {
    // The device had enough free, and the request still failed: a limit was set at run time
    // (set_per_process_memory_fraction). It is not recorded; it was not above this.
    facts.limit_is_inferred = true;
    facts.allowed_bytes = facts.reserved_bytes + facts.segment_bytes - 1;
  }
}

// cuBLAS asks for what PyTorch was configured to give it; what else a matrix product allocates after its first block is a
// tensor: under autocast the casts of its arguments come before its result.
bool asks_for_workspace(const OutOfMemory& failure, const Device& device) {
  if (!takes_workspace(failure.where.inner) || failure.first_in_op || !failure.requested_shape.empty()) return false;
  if (!is_gemm(failure.where.inner)) return true;
  return is_cublas_workspace(failure.requested_bytes, device.cublas_workspace_bytes);
}

// A buffer that grows is made anew while the old one lives: the request itself has grown, too, as much as one of them.
int64_t grown_in_request(const OutOfMemory& failure, const std::vector<Growth>& growths) {
  for (const Growth& growth : growths) {
    const bool itself = growth.held.op == failure.where.op && growth.held.source == failure.where.source;
    if (growth.kind != GrowthKind::growing_buffer || !itself) continue;
    return std::min(failure.requested_bytes, growth.grown_bytes / static_cast<int64_t>(growth.place_count));
  }
  return 0;
}

bool is_own(const NonPytorchOwner& owner) {
  return owner.owner == "context" || owner.owner == "modules" || owner.kind == "system";
}

// What any process takes of the device before PyTorch does. Part of it may be unexplained.
int64_t usual_non_pytorch(const MemoryState& state, int64_t context_bytes) {
  int64_t own = 0;
  int64_t unexplained = 0;
  for (const NonPytorchOwner& owner : state.non_pytorch) {
    if (is_own(owner)) own += owner.bytes;
    if (owner.owner == "unexplained") unexplained = owner.bytes;
  }
  if (own == 0) return context_bytes > 0 ? context_bytes : kUsualContextBytes;
  return own + std::clamp<int64_t>(unexplained, 0, std::max<int64_t>(0, kUsualContextBytes - own));
}

// Libraries ask the driver for what their handles, code and communicators take. The allocator is not asked and frees nothing
// for it.
std::string find_library(const DeviceHistory& device) {
  const auto asked =
      std::ranges::find(device.failed_driver_requests, device.failure->requested_bytes, &NonPytorchOwner::bytes);
  return asked == device.failed_driver_requests.end() ? std::string() : asked->owner;
}

int64_t count_kept_alike(const MemoryState& state, const OutOfMemory& failure) {
  return std::ranges::count_if(state.blocks, [&](const LiveBlock& block) {
    return !block.pending_free && block.bytes == failure.requested_bytes && block.made.op == failure.where.op &&
           block.made.module == failure.where.module && block.made.source == failure.where.source;
  });
}

int64_t sum_kept_results(const MemoryState& state) {
  struct Kept {
    int64_t count = 0, bytes = 0;
  };
  std::map<std::tuple<std::string_view, std::string_view, std::string_view, int64_t>, Kept> alike;
  int64_t most = 0;
  for (const LiveBlock& block : state.blocks) {
    if (block.pending_free || block.category != Category::output) continue;
    Kept& kept = alike[{block.made.op, block.made.module, block.made.source, block.bytes}];
    kept.bytes += block.bytes;
    if (++kept.count >= kFewestAlike) most = std::max(most, kept.bytes);
  }
  return most;
}

bool saves_for_backward(const MemoryState& state) {
  return std::any_of(state.blocks.begin(), state.blocks.end(),
                     [](const LiveBlock& block) { return block.category == Category::activation; });
}

/// Forward saves more as it goes on. Of a pass without a graph that is not known: where what lies in pieces would have served the
/// request, they are what to look at.
bool forward_continues(const MemoryState& state, const OutOfMemory& failure) {
  const int64_t cached = state.reserved_bytes - state.allocated_bytes - state.pending_free_bytes;
  return failure.phase == Phase::forward && (saves_for_backward(state) || cached < failure.requested_bytes);
}

}  // namespace

std::vector<NonPytorchOwner> list_foreign_owners(const MemoryState& state) {
  std::vector<NonPytorchOwner> owners = state.non_pytorch;
  std::erase_if(owners, [](const NonPytorchOwner& owner) { return is_own(owner) || owner.bytes <= 0; });
  std::stable_sort(owners.begin(), owners.end(),
                   [](const NonPytorchOwner& a, const NonPytorchOwner& b) { return a.bytes > b.bytes; });
  return owners;
}

FailureFacts collect_facts(const DeviceHistory& device, const AllocatorSettings& settings, const Device& limits,
                           const std::vector<Growth>& growths, const StepNeed& need) {
  const OutOfMemory& failure = *device.failure;
  const MemoryState& state = device.state;
  FailureFacts facts{.requested_bytes = failure.requested_bytes,
                     .segment_bytes = segment_size(failure.requested_bytes, settings),
                     .is_workspace = asks_for_workspace(failure, limits),
                     .forward_continues = forward_continues(state, failure),
                     .kept_alike = count_kept_alike(state, failure),
                     .kept_results_bytes = sum_kept_results(state),
                     .library = find_library(device),
                     .total_bytes = limits.total_bytes,
                     .free_bytes = state.free_bytes,
                     .reserved_bytes = state.reserved_bytes,
                     .cached_bytes = state.reserved_bytes - state.allocated_bytes - state.pending_free_bytes,
                     .pending_free_bytes = state.pending_free_bytes,
                     .non_pytorch_bytes = state.non_pytorch_bytes,
                     .usual_non_pytorch_bytes = usual_non_pytorch(state, limits.context_bytes),
                     .grown_bytes = sum_grown(growths) + grown_in_request(failure, growths),
                     .bytes_per_step = sum_per_step(growths),
                     .grown_until_step = growths.empty() ? 0 : growths.front().last_step,
                     .step = need};
  read_segments(state, failure.pool, facts);
  read_limit(state, settings, facts);
  return facts;
}

}  // namespace oomdiag
