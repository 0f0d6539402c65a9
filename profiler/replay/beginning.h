#pragma once

#include <cstdint>
#include <span>

#include "profiler/event.h"

namespace oomdiag {

/// The layout of one card at the beginning of a recording that began in the middle of a program, or went on after a stop:
/// the run of events that begins at `index`, empty if none does.
std::span<const Event> find_beginning(std::span<const Event> events, uint64_t index);

}  // namespace oomdiag
