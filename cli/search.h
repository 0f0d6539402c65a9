#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace oomdiag {

/// Whether a run with this value passes.
using Trial = std::function<bool(int64_t value)>;

/// The smallest multiple of `step` above `fails` and not above `passes` that passes, by bisection. `passes` is taken to
/// pass and `fails` to fail: neither is tried.
int64_t find_smallest(int64_t fails, int64_t passes, int64_t step, const Trial& trial);

/// The largest value from `least` to `most` that passes: twice the value while it passes, then bisection. nullopt if
/// `least` fails. Small values are tried first, so that most runs are quick.
std::optional<int64_t> find_largest(int64_t least, int64_t most, const Trial& trial);

}  // namespace oomdiag
