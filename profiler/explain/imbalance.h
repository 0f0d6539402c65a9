#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "profiler/explain/findings.h"

namespace oomdiag {

/// One card or rank that holds far more than the others that do the same work.
struct Imbalance {
  int64_t fullest_bytes = 0;
  int64_t others_bytes = 0;  ///< the median of the others
  int64_t even_bytes = 0;    ///< what each would hold if all held the same

  bool operator==(const Imbalance&) const = default;
};

/// The figures that prove it.
Figures evidence_of(const Imbalance& imbalance);

/// Whether the one at `failed` is at least 1.5 times as full as the median of the others, and would have had room for the
/// refused request at an even share of `card_bytes`. `peak_bytes`: allocated at most, by card or rank; those that hold
/// less than a twentieth of the fullest do other work and do not count.
std::optional<Imbalance> find_imbalance(std::span<const int64_t> peak_bytes, size_t failed, int64_t refused_bytes,
                                        int64_t card_bytes);

/// Names imbalance as the cause where the card that failed lacked capacity, and another share of the work between the
/// program's `devices` would have fitted. `findings` are those of the devices, in order.
void blame_imbalance(const std::vector<DeviceHistory>& devices, std::vector<Findings>& findings);

}  // namespace oomdiag
