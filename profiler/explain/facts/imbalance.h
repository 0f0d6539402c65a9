#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "profiler/field.h"
#include "profiler/replay/history.h"

namespace oomdiag {

/// One GPU or rank that holds far more than the others that do the same work.
struct Imbalance {
  int64_t fullest_bytes = 0;
  int64_t others_bytes = 0;
  int64_t even_bytes = 0;

  bool operator==(const Imbalance&) const = default;
};

void visit_fields(auto& visit, Either<Imbalance> auto& value) {
  visit.object("uneven_share", "What the devices or ranks of a program hold, compared.");
  visit({"fullest_bytes", "peak of the one that failed"}, value.fullest_bytes);
  visit({"others_bytes", "median of the others"}, value.others_bytes);
  visit({"even_bytes", "what each would hold if all held the same"}, value.even_bytes);
}

/// Whether the one at `failed` is at least 1.5 times as full as the median of the others, and would have had room for the
/// failed request at an even share of `gpu_bytes`. `peak_bytes`: allocated at most, by GPU or rank; those that hold
/// less than a twentieth of the fullest do other work and do not count.
std::optional<Imbalance> find_imbalance(std::span<const int64_t> peak_bytes, size_t failed, int64_t requested_bytes,
                                        int64_t gpu_bytes);

/// The imbalance between the program's `devices` if the one at `failed` ran out. Where it failed in the middle of a step the
/// others may not have come as far in it: what they held in the steps before is taken to grow as that of the failed one did.
std::optional<Imbalance> compare_devices(const std::vector<DeviceHistory>& devices, size_t failed);

}  // namespace oomdiag
