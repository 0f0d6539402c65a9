#pragma once

#include <cstdint>
#include <string>

#include "profiler/explain/facts/growth.h"
#include "profiler/explain/reasons/reasons.h"

// What several rows of kReasons ask of growth.

namespace oomdiag {

inline constexpr int64_t kSeveralPasses = 8;

/// Whether a variable leads to many nodes.
bool keeps_nodes(const ReasonFacts& facts);

/// Whether graphs of earlier steps are gone, and outputs of their ops stay: variables refer to most of what stays. Where
/// variables are not known, what a node had saved is saved by none any more. Nothing is known of graphs that backward has not
/// come to; and what no node saves may be the result of a convolution.
bool keeps_outputs(const ReasonFacts& facts, const Growth& growth);

/// Whether variables keep the tensors themselves, and not through a graph.
bool consists_of_tensors(const ReasonFacts& facts, const Growth& growth);

/// "8.00 MiB per step".
std::string growing_text(const Growth& growth);

}  // namespace oomdiag
