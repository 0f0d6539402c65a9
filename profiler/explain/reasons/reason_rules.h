#pragma once

#include "profiler/explain/reasons/reasons.h"

// The functions of the reasons (reasons.inc): what each finds, or nothing.

namespace oomdiag {

using Found = std::optional<Reason>;

#define REASON(name, function, ...) Found function(const ReasonFacts& facts);
#include "profiler/explain/reasons/reasons.inc"  // IWYU pragma: keep
#undef REASON

inline constexpr double kLargePart = 0.3;
inline constexpr double kWorthNaming = 0.2;  ///< of graphs, and of what one op makes

/// Of the request that failed; 0 where none did.
int64_t requested_bytes(const ReasonFacts& facts);

/// Whether `bytes` are at least this part of what was allocated and requested.
bool is_large(const ReasonFacts& facts, int64_t bytes, double part = kLargePart);

/// Whether an optimizer has parameters of the program.
bool trains(const ReasonFacts& facts);

}  // namespace oomdiag
