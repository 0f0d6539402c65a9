#pragma once

#include <string>

#include "profiler/event.h"
#include "profiler/trace/writer.h"

// What the driver gives to everybody in this process, not to PyTorch alone: CUPTI reports each call that takes or gives
// memory, NVML how much of the GPU is used and by which processes. Together they name the bytes that PyTorch does not count.

namespace oomdiag {

struct CollectorOptions {
  bool virtual_device = false;  ///< the GPU charges whole pages of 2 MiB
  bool may_hold_slot =
      false;                 ///< nobody is hurt when we hold CUPTI's only slot: others share it (slot.h), or do without
  bool with_stacks = false;  ///< write the stack of each allocation
};

/// An event of this kind with what the calling thread is doing filled in. Runs inside of the driver's calls.
using MakeEvent = Event (*)(EventKind) noexcept;

/// Subscribes to CUPTI and opens NVML: once, and best before the process uses CUDA. If CUPTI is not to be had, says so in one
/// line on stderr, with the name of whoever holds it: the report then names no owners.
void start_collecting(const CollectorOptions& options) noexcept;

/// What the shim calls in place of CUPTI (slot.h).
struct CuptiGate;
const CuptiGate* cupti_gate() noexcept;

/// From now on events are written, first those of before. The writer must live as long as the process.
void attach_collector(TraceWriter& writer, MakeEvent make_event) noexcept;

/// Writes which other processes hold the GPU and, when the oldest events were overwritten, what the driver's calls gave that
/// is still alive. For an OOM and for the end.
void describe_gpu(uint8_t device) noexcept;

/// Subscribes again after somebody ended CUPTI (cuptiFinalize). Costs nothing while that is not so; for the end of a step.
void resume_collecting() noexcept;

/// Switches the collector off in a forked child.
void stop_collecting_in_child() noexcept;

/// "" while calls of the driver are seen, else why not.
std::string why_not_collecting();

}  // namespace oomdiag
