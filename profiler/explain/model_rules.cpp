#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "profiler/explain/bytes_text.h"
#include "profiler/explain/reason_evidence.h"
#include "profiler/explain/reason_rules.h"
#include "profiler/explain/shape.h"
#include "profiler/one_of.h"

// Rows of kReasons about models themselves: several that are alive, copies of weights, files, and models that are too large.

namespace oomdiag {
namespace {

/// What torch.load makes, it makes without an op: such a tensor of a weight's size is a weight or a moment of a file.
bool is_copy_of_weights(const LiveBlock& block, const std::set<int64_t>& weights) {
  return block.category == Category::unknown && block.made.op.empty() && block.made.node.empty() &&
         !block.before_recording && weights.contains(block.requested_bytes);
}

/// Whether a copy of a weight that the program keeps: of a state dict, or of a model that was not called yet.
bool is_kept_copy(const LiveBlock& block, const std::set<int64_t>& weights) {
  const bool is_copied = is_copy(block.made.op) || is_one_of(block.made.op, {"aten::clone", "aten::empty_like"});
  const bool is_kept = is_one_of(name_of(block.category), {"input", "output", "unknown"}) && block.made.node.empty();
  return is_kept && is_copied && block.made.module.empty() && weights.contains(block.requested_bytes);
}

int64_t sum_category(const ReasonFacts& facts, Category category) {
  return sum_blocks(facts, [&](const LiveBlock& block) { return block.category == category; }).bytes;
}

/// "AdamW" of "AdamW, group 1".
std::string_view optimizer_of(const LiveBlock& block) { return block.group.substr(0, block.group.find(',')); }

}  // namespace

Found find_several_models(const ReasonFacts& facts) {
  std::map<std::pair<std::string_view, std::string_view>, std::pair<int64_t, int64_t>> names;
  for (const LiveBlock& block : facts.device.state.blocks) {
    const bool is_inside = block.name.find('.') != block.name.npos;  // else it may be one of a list of layers
    if (block.category != Category::parameter || !is_inside) continue;
    auto& [count, bytes] = names[{block.name, block.shape}];
    ++count;
    bytes += block.bytes;
  }
  int64_t twice = 0, models = 0;
  for (const auto& [name, sums] : names) {
    if (sums.first < 2) continue;
    twice += sums.second;
    models = std::max(models, sums.first);
  }
  const Share all = sum_blocks(facts, [](const LiveBlock& block) { return is_of_models(block.category); });
  if (models < 2 || !is_large(facts, twice, 0.15) || !is_large(facts, all.bytes, 0.5)) return {};
  return Reason{
      .id = {},
      .text = fmt::format("{} models of the same layers are alive: {} of parameters, gradients and optimizer state",
                          models, with_unit(all.bytes)),
      .bytes = all.bytes - all.bytes / models,
      .fix = "drop_models",
      .how = {"del model, optimizer  # of one that is still needed: model.bfloat16(), or model.cpu() until then"}};
}

Found find_weight_copies(const ReasonFacts& facts) {
  const std::set<int64_t> weights = find_sizes_of_weights(facts);
  const Share copies = sum_blocks(facts, [&](const LiveBlock& block) { return is_kept_copy(block, weights); });
  const int64_t parameters = sum_category(facts, Category::parameter);
  if (copies.count < 2 || copies.bytes * 10 < parameters * 8 || !is_large(facts, copies.bytes, 0.15)) return {};
  return Reason{
      .id = {},
      .text = fmt::format("another copy of the model's weights is kept on the GPU{}: {} beside {} of parameters",
                          at(copies.made()), with_unit(copies.bytes), with_unit(parameters)),
      .bytes = copies.bytes,
      .fix = "copies_on_host"};
}

Found find_loaded(const ReasonFacts& facts) {
  const std::set<int64_t> weights = find_sizes_of_weights(facts);
  const Share loaded = sum_blocks(facts, [&](const LiveBlock& block) {
    return has(block.made.inner_source, "torch/serialization") || has(block.made.source, "serialization.py") ||
           (block.made.op.empty() && block.phase == Phase::setup &&
            is_one_of(name_of(block.category), {"unknown", "output"})) ||
           is_copy_of_weights(block, weights);
  });
  if (!is_large(facts, loaded.bytes, 0.25)) return {};
  return Reason{.id = {},
                .text = fmt::format("torch.load put tensors of a file onto the GPU{}: {}", at(loaded.made()),
                                    with_unit(loaded.bytes)),
                .bytes = loaded.bytes,
                .fix = "load_to_host",
                .how = {"state = torch.load(path, map_location=\"cpu\")" + comment_at(loaded.made())}};
}

// Of a layer behind nn.Flatten, whose inputs are all positions of all channels.
Found find_large_layer(const ReasonFacts& facts) {
  constexpr int64_t kManyInputs = 16384;
  const LiveBlock* weight =
      sum_blocks(facts, [](const LiveBlock& block) { return block.category == Category::parameter; }).largest;
  if (weight == nullptr) return {};
  const std::vector<int64_t> shape = parse_shape(weight->shape);
  if (shape.size() != 2 || shape[1] < kManyInputs || shape[1] < 4 * shape[0]) return {};
  const Share alike = sum_blocks(facts, [&](const LiveBlock& block) {
    return is_of_models(block.category) && block.requested_bytes == weight->requested_bytes;
  });
  const bool asks = requested_bytes(facts) >= weight->requested_bytes;
  const int64_t bytes = alike.bytes + (asks ? requested_bytes(facts) : 0);
  if (!is_large(facts, bytes, 0.5)) return {};
  return Reason{
      .id = {},
      .text = fmt::format("one layer has most of the parameters: {} {}, {}, and as much for its gradient and "
                          "for each moment of the optimizer",
                          weight->name.empty() ? "a weight" : weight->name, weight->shape, with_unit(weight->bytes)),
      .bytes = bytes,
      .fix = "smaller_layer"};
}

Found find_model_states(const ReasonFacts& facts) {
  const OutOfMemory* failed = failure(facts);
  if (failed == nullptr) return {};
  const Share all = sum_blocks(facts, [](const LiveBlock& block) { return is_of_models(block.category); });
  const int64_t asks = failed->phase == Phase::optimizer ? failed->requested_bytes : 0;
  const auto trained = std::ranges::find(facts.device.state.blocks, true, &LiveBlock::trained);
  if (trained == facts.device.state.blocks.end() || !is_large(facts, all.bytes + asks, 0.75)) return {};
  const std::string_view optimizer = optimizer_of(*trained);
  return Reason{.id = {},
                .text = fmt::format("the model itself: {} of parameters, {} of gradients and {} of {} state so far",
                                    with_unit(sum_category(facts, Category::parameter)),
                                    with_unit(sum_category(facts, Category::gradient)),
                                    with_unit(sum_category(facts, Category::optimizer_state)),
                                    optimizer.empty() ? "the optimizer's" : std::string(optimizer) + "'s"),
                .bytes = all.bytes + asks};
}

}  // namespace oomdiag
