#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "profiler/event.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/event_log.h"
#include "profiler/trace/format.h"

namespace oomdiag {

/// Finds the blocks that were alive before the first of `events`: those in the tables that are older, and those whose free we
/// still see. The tables still have most of these too; of the others it is not known when they were allocated. What was
/// freed after `last_sequence` was alive as well.
std::vector<Event> find_initial_blocks(const std::shared_ptr<const InputFile>& file, const TraceHeader& header,
                                       uint64_t first_sequence, uint64_t last_sequence, const EventLog& events);

}  // namespace oomdiag
