#pragma once

#include <string>

#include "profiler/snapshot/timeline.h"

namespace oomdiag {

/// What a timeline shows, what it does not, and what to record instead.
std::string to_text(const MemoryTimeline& timeline, bool unicode);

}  // namespace oomdiag
