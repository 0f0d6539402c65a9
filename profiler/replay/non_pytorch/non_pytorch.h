#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// What the driver gave somebody and has not got back.
struct DriverAllocation {
  int64_t bytes = 0;  ///< of the GPU: on a virtual one charged_bytes(), on a real one what was asked for
  DriverMemory memory = DriverMemory::device;
  std::string_view owner{};
  uint32_t context = 0;    ///< what the thread that asked was doing
  uint64_t mapped = 0;     ///< where the pages of a handle were first mapped; 0 = nowhere, or not known
  bool announced = false;  ///< older than the trace: what PyTorch made of it was not seen
  bool pytorchs = false;   ///< a segment of PyTorch's lies in it, whoever asked for it

  bool operator==(const DriverAllocation&) const = default;
};

/// Another process on the GPU.
struct GpuProcess {
  uint64_t pid = 0;
  int64_t bytes = 0;
  std::string_view name{};

  bool operator==(const GpuProcess&) const = default;
};

/// What the driver and NVML reported about one GPU up to a moment.
struct NonPytorchState {
  std::map<uint64_t, DriverAllocation> live{};  ///< by address or handle
  std::map<uint64_t, uint64_t> handle_at{};     ///< by address: the handle that was mapped there first
  std::vector<InitializationStep> steps{};
  std::vector<GpuProcess> processes{};
  std::vector<NonPytorchOwner> failed_requests{};  ///< the largest failed request of each library

  bool operator==(const NonPytorchState&) const = default;
};

/// Folds those of `events` (indices into the trace, ascending) that lie before index `end`. Of a trace whose beginning was
/// overwritten, what is announced later as still alive counts from the start.
NonPytorchState read_non_pytorch(const Trace& trace, std::span<const uint64_t> events, uint64_t end);

/// Who holds non-PyTorch memory of the GPU, as far as `state` knows: context, modules, libraries by name
/// (largest first), other processes. PyTorch's own is left out; of what is older than the trace, that in which one of
/// `segments` lies.
std::vector<NonPytorchOwner> list_owners(const NonPytorchState& state, std::span<const SegmentLayout> segments);

/// Who holds pinned and managed memory: the former is the host's, the latter may be on either side.
std::vector<NonPytorchOwner> list_host_owners(const NonPytorchState& state);

/// The pinned host blocks by the places where they were requested, largest first.
std::vector<PinnedHostMemory> list_pinned_host_memory(const Trace& trace, const NonPytorchState& state);

int64_t sum_of(std::span<const NonPytorchOwner> owners);

}  // namespace oomdiag
