#include "cli/search.h"

#include <algorithm>

namespace oomdiag {

int64_t find_smallest(int64_t fails, int64_t passes, int64_t step, const Trial& trial) {
  int64_t low = fails / step, high = (passes + step - 1) / step;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (trial(middle * step) ? high : low) = middle;
  }
  return high * step;
}

std::optional<int64_t> find_largest(int64_t least, int64_t most, const Trial& trial) {
  if (!trial(least)) return std::nullopt;
  int64_t passes = least, fails = most + 1;
  while (passes < most) {
    const int64_t next = std::min(most, std::max<int64_t>(1, passes) * 2);
    if (!trial(next)) {
      fails = next;
      break;
    }
    passes = next;
  }
  while (fails - passes > 1) {
    const int64_t middle = passes + (fails - passes) / 2;
    (trial(middle) ? passes : fails) = middle;
  }
  return passes;
}

}  // namespace oomdiag
