#pragma once

#include <cupti.h>

#include <cstdint>
#include <vector>

#include "profiler/event.h"

namespace oomdiag {

/// What a call of the driver means for the allocations.
enum class DriverAction : uint8_t {
  none,
  allocate,  ///< after the call
  release,   ///< before the call: another thread may be given the same address as soon as it is free
  map,       ///< one more reference to the pages of a handle
  unmap,
  retain,  ///< one more reference without a mapping
};

struct DriverCall {
  DriverAction action = DriverAction::none;
  DriverMemory memory = DriverMemory::device;
  bool out_of_memory = false;  ///< allocate: the driver failed for lack of memory
  int device = -1;             ///< where the call says so
  uint64_t address = 0;        ///< pointer; of handle memory: the handle
  uint64_t mapped = 0;         ///< map, unmap: where
  int64_t bytes = 0;

  bool operator==(const DriverCall&) const = default;
};

/// The calls of the driver that take or give memory, by the ids of cupti_driver_cbid.h; both ways of calling the functions that
/// have one for the per-thread default stream.
std::vector<CUpti_CallbackId> memory_calls();

/// Reads one side of one of these calls, its parameters as generated_cuda_meta.h has them.
DriverCall read_call(CUpti_CallbackId id, const CUpti_CallbackData& data) noexcept;

}  // namespace oomdiag
