#include "profiler/report/batch.h"

#include <map>

#include "profiler/explain/remedies.h"
#include "profiler/report/card_report.h"

namespace oomdiag {

std::optional<int64_t> find_batch(const Moment& moment) {
  constexpr int64_t kLeast = 2;
  std::map<int64_t, int64_t> bytes_by_first_size;
  int64_t all = 0;
  for (const LiveBlock& block : moment.blocks) {
    const std::vector<int64_t> shape = parse_shape(block.shape);
    const bool counts = block.category == Category::activation || block.category == Category::input;
    if (!counts || block.pending_free || shape.size() < 2) continue;  // of one size are biases and counts
    bytes_by_first_size[shape.front()] += block.bytes;
    all += block.bytes;
  }
  for (const auto& [candidate, own] : bytes_by_first_size) {
    if (candidate < kLeast || own < all / 20) continue;  // leaves twenty candidates at most
    int64_t divisible = 0;
    for (const auto& [size, bytes] : bytes_by_first_size) divisible += size % candidate == 0 ? bytes : 0;
    if (divisible >= all / 5 * 4) return candidate;
  }
  return std::nullopt;
}

void infer_batch(const DeviceHistory& device, ReportOfDevice& report) {
  if (device.failure) return;
  const auto batch = find_batch(device.moment);
  if (!batch) return;
  const int64_t room = report.device.total_bytes - device.moment.outside_bytes;
  const BatchModel model = model_batch(device.moment, 0, *batch, room);
  report.batch = {.batch = model.batch,
                  .fixed_bytes = model.fixed_bytes,
                  .scaling_bytes = model.scaling_bytes,
                  .largest_batch = model.largest_batch,
                  .inferred = true};
}

}  // namespace oomdiag
