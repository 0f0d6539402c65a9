#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/reasons/reasons.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

// What the tests of reasons are made of: a GPU at the moment at which memory ran out, by its blocks.

namespace oomdiag {

inline LiveBlock kept_activation(int64_t bytes, uint32_t step) {
  return {.bytes = bytes,
          .category = Category::activation,
          .phase = Phase::forward,
          .step = step,
          .made = {.op = "aten::gelu", .module = "0.act", .source = "net.py:9"},
          .shape = "[64, 64] float32"};
}

/// Ran out of memory in forward of step 5, for as much as is allocated.
inline DeviceHistory at_oom(std::vector<LiveBlock> blocks, std::string_view stack = {}) {
  DeviceHistory device;
  for (const LiveBlock& block : blocks) device.state.allocated_bytes += block.bytes;
  device.state.blocks = std::move(blocks);
  device.failure = OutOfMemory{.step = 5, .phase = Phase::forward, .requested_bytes = 64_MiB, .stack = stack};
  device.attribution.backward_bytes = 1_GiB;
  return device;
}

/// What can be said of any step is none.
inline std::string reason_of(const DeviceHistory& device, const std::vector<Growth>& growths = {}) {
  const auto reason = find_reason({.device = device, .growths = growths});
  if (!reason || reason->id == "whole_step") return {};
  CHECK((reason->fix.empty() || find_fix(reason->fix) != nullptr));
  return reason->id;
}

inline constexpr std::string_view kValidates =
    "/a/net.py:9 in forward\n/a/train.py:68 in validate\n/a/train.py:90 in main";

inline StepAllocation graph_block(std::string_view module, int64_t bytes) {
  return {.bytes = bytes,
          .born = 1,
          .phase = Phase::forward,
          .in_graph = true,
          .made = {.op = "aten::relu", .module = module, .source = "net.py:5"}};
}

inline LiveBlock parameter(std::string_view name, bool trained) {
  return {
      .bytes = 1_MiB, .category = Category::parameter, .name = name, .shape = "[512, 512] float32", .trained = trained};
}

inline LiveBlock moved_weight(std::string_view line) {
  return {.bytes = 40_MiB,
          .requested_bytes = 40_MiB,
          .category = Category::input,
          .made = {.op = "aten::to", .source = line},
          .shape = "[10, 10] float32"};
}

/// As a model goes to the GPU at load.py:9.
inline DeviceHistory while_moving(std::vector<LiveBlock> before) {
  before.insert(before.end(), 4, moved_weight("load.py:9"));
  DeviceHistory device = at_oom(std::move(before));
  device.failure->phase = Phase::other;
  device.failure->where = {.op = "aten::to", .source = "load.py:9"};
  device.referrers = {{.variable = "dict 'model._modules[0]._parameters' in load (load.py:3)",
                       .made = {.op = "aten::to", .source = "load.py:9"},
                       .storage_bytes = 40_MiB}};
  return device;
}

}  // namespace oomdiag
