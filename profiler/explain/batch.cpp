#include "profiler/explain/batch.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "profiler/explain/findings.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/words/shape.h"
#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/history.h"

namespace oomdiag {

int64_t largest_batch_by_bytes(const BatchModel& model, int64_t available_bytes) {
  const int64_t left = available_bytes - model.fixed_bytes;
  if (left <= 0 || model.scaling_bytes <= 0) return 0;
  const double largest =
      static_cast<double>(model.batch) * static_cast<double>(left) / static_cast<double>(model.scaling_bytes);
  return largest < static_cast<double>(kMaxBytes) ? static_cast<int64_t>(largest) : kMaxBytes;
}

namespace {

bool follows_batch(const LiveBlock& block) {
  if (block.pending_free) return false;
  if (block.category == Category::workspace) return workspace_follows_batch(block.made);
  if (block.phase == Phase::optimizer) return follows_batch_in_optimizer(block.category);
  return traits_of(block.category).follows_batch;
}

}  // namespace

BatchModel model_batch(const MemoryState& state, int64_t requested_bytes, int64_t batch, int64_t available_bytes) {
  BatchModel model{.batch = batch, .scaling_bytes = requested_bytes};
  for (const LiveBlock& block : state.blocks) model.scaling_bytes += follows_batch(block) ? block.bytes : 0;
  model.fixed_bytes = state.allocated_bytes + requested_bytes - model.scaling_bytes;
  model.largest_batch = largest_batch_by_bytes(model, available_bytes);
  if (requested_bytes > 0) model.largest_batch = std::min(model.largest_batch, batch - 1);
  return model;
}

namespace {

/// Sizes of the weights of two dimensions, both ways round: what is saved as large is a cast of one, or a view that turns it.
std::set<std::vector<int64_t>> list_sizes_of_weights(const MemoryState& state) {
  std::set<std::vector<int64_t>> sizes;
  for (const LiveBlock& block : state.blocks) {
    std::vector<int64_t> shape =
        block.category == Category::parameter ? parse_shape(block.shape) : std::vector<int64_t>();
    if (shape.size() != 2) continue;
    sizes.insert(shape);
    std::swap(shape[0], shape[1]);
    sizes.insert(shape);
  }
  return sizes;
}

}  // namespace

std::optional<int64_t> find_batch(const MemoryState& state) {
  constexpr int64_t kLeast = 2;
  const std::set<std::vector<int64_t>> weights = list_sizes_of_weights(state);
  std::map<int64_t, int64_t> bytes_by_first_size;
  std::map<std::pair<int64_t, int64_t>, int64_t> bytes_by_sizes;  // of the first two dimensions
  std::set<int64_t, std::greater<>> of_inputs;
  int64_t all = 0;
  for (const LiveBlock& block : state.blocks) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    const bool counts = block.category == Category::activation || block.category == Category::input;
    if (!counts || block.pending_free || shape.size() < 2) continue;  // of one size are biases and counts
    if (weights.contains(shape)) continue;
    if (block.category == Category::input && shape.front() == 1) return std::nullopt;  // tokens of one sequence
    if (block.category == Category::input) of_inputs.insert(shape.front());
    if (shape.size() > 2)
      bytes_by_first_size[shape.front()] += block.bytes;  // [tokens, width] is of no one size of the data
    bytes_by_sizes[{shape[0], shape[1]}] += block.bytes;
    all += block.bytes;
  }
  const auto divides_most = [&](int64_t candidate) {
    int64_t divisible = 0;
    for (const auto& [sizes, bytes] : bytes_by_sizes) {
      const bool is_of_batch =
          sizes.first % candidate == 0 || sizes.second == candidate;  // of an RNN [length, batch, …]
      divisible += is_of_batch ? bytes : 0;
    }
    return divisible >= all / 5 * 4;
  };
  for (const int64_t candidate : of_inputs) {
    if (candidate >= kLeast && divides_most(candidate)) return candidate;
  }
  for (const auto& [candidate, own] : bytes_by_first_size) {
    if (candidate < kLeast || own < all / 20) continue;  // leaves twenty candidates at most
    if (divides_most(candidate)) return candidate;
  }
  return std::nullopt;
}

}  // namespace oomdiag
