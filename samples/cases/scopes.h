#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "profiler/trace/trace.h"

namespace oomdiag {

/// One call of a user scope: a layer, or a part of a sample's loop ("sample#forward" in the trace, "forward" here). Bytes
/// are those of the first GPU.
struct ScopeCall {
  std::string name;
  int64_t begin_bytes = 0, peak_bytes = 0, end_bytes = 0;  ///< allocated
  int64_t begin_reserved_bytes = 0, end_reserved_bytes = 0;
  int64_t kept_bytes = 0;  ///< made inside, and alive when the scope around this one ends (without one: when it ends)

  bool operator==(const ScopeCall&) const = default;
};

/// Blocks that live no longer than the operator that takes them.
struct Transient {
  std::string op, node;  ///< node: the autograd node that runs the operator, or empty
  int64_t most_bytes = 0;
  int64_t count = 0;

  bool operator==(const Transient&) const = default;
};

/// What the scopes of a program say about its memory.
struct ScopeSheet {
  std::vector<ScopeCall> calls;               ///< in the order in which they began
  std::map<std::string, int64_t> most_alive;  ///< by name: the most bytes made in its calls that were alive at once
  std::vector<Transient> transients;          ///< largest first
};

/// Replays the first GPU of `trace` and reads its scopes. Scopes of several threads are taken as one stack: in the samples
/// one thread waits while another works.
ScopeSheet read_scopes(const Trace& trace);

}  // namespace oomdiag
