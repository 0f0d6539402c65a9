#pragma once

#include <cstdint>
#include <vector>

#include "profiler/event.h"
#include "profiler/trace/event_log.h"

namespace oomdiag {

/// The layout of one GPU at the beginning of a recording that began in the middle of a program, or went on after a stop:
/// the run of events that begins at `index`, cut off after kMaxLayoutEvents; empty if none does.
std::vector<Event> find_initial_layout(const EventLog& events, uint64_t index);

}  // namespace oomdiag
