#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "extension/virtual_device/device_files/gpu.h"

namespace oomdiag {

/// The most GPUs that a machine may have.
inline constexpr size_t kMaxVirtualDevices = 16;

/// One GPU of the machine.
struct Device {
  int index = 0;     ///< its place in the machine, which NVML counts by: what its bus id and uuid are made of
  int ordinal = -1;  ///< what this process calls it; -1 where CUDA_VISIBLE_DEVICES hides it
  Gpu gpu;
  std::string cudnn_description;
  int architecture = 0;
  std::atomic<uint32_t> peers = 0;      ///< a bit for each ordinal whose memory it may reach
  std::atomic<int64_t> held_bytes = 0;  ///< by this process; changed by charge() and refund() (memory_account.h)
};

/// The machine's driver: OOMDIAG_DRIVER, or the newest one of Linux.
const Driver& machine_driver();

/// Reads OOMDIAG_DEVICE_FILES (device files, one per line) and OOMDIAG_MEMORY, once: the machine as NVML sees it. A failure is one line
/// on stderr, and a machine without GPUs.
void read_machine();

/// The version of CUDA that the driver has, as in 13020.
int driver_version();

/// cuInit: picks the GPUs that CUDA_VISIBLE_DEVICES shows, once. Success, or no device, or not initialised in a child forked
/// from a process that used CUDA, as on a real GPU; who only asked NVML may fork.
CUresult initialize_devices();

/// The answer that cuInit gave; CUDA_ERROR_NOT_INITIALIZED before it.
CUresult check_initialized() noexcept;

/// Whether this process was forked from one that used CUDA. It must touch no lock of ours.
bool is_forked_child() noexcept;

/// The number of visible devices; 0 before initialize_devices().
int count_devices() noexcept;

/// The visible device of that ordinal, null when there is none.
Device* find_device(int ordinal) noexcept;

/// The GPU at that place in the machine, visible or not; null when there is none.
Device* find_installed(int index) noexcept;

/// The device of the thread's current context, null when it has none (context.h).
Device* current_device() noexcept;

}  // namespace oomdiag
