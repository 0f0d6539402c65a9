#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "extension/nvml.h"
#include "profiler/trace/format.h"

namespace oomdiag {

/// A process that uses a GPU.
struct ProcessOnGpu {
  uint32_t pid = 0;
  int64_t bytes = 0;
};

/// What NVML says of a GPU.
struct NvmlReading {
  static constexpr size_t kMaxProcesses = 32;

  bool valid = false;
  int64_t used_bytes = 0;    ///< by everybody
  size_t process_count = 0;  ///< of `processes`; more are left out
  std::array<ProcessOnGpu, kMaxProcesses> processes{};

  std::span<const ProcessOnGpu> listed() const { return {processes.data(), process_count}; }
  bool lists(uint32_t pid) const {
    return std::any_of(listed().begin(), listed().end(), [&](const ProcessOnGpu& one) { return one.pid == pid; });
  }
};

/// Reads GPUs through NVML, which needs no context and may be called inside of a call of the driver. Without NVML (some
/// containers, Jetson) readings are not valid. GPUs are numbered as the driver numbers them in this process.
class NvmlReader {
 public:
  /// Opens NVML; finds nothing out about GPUs yet, so it may come before cuInit.
  void open() noexcept;
  bool is_open() const { return ready_; }

  /// Any thread, but not two at once.
  NvmlReading read(int device) noexcept;

  /// Bytes used on a GPU when `open` was called, before cuInit; -1 if that is not known.
  int64_t used_at_start(int device) noexcept;

 private:
  nvmlDevice_t gpu_of(int device) noexcept;

  bool ready_ = false;
  std::array<nvmlDevice_t, kMaxDevices> gpus_{};
  struct Start {
    nvmlDevice_t gpu = nullptr;
    int64_t used_bytes = 0;
  };
  std::array<Start, kMaxDevices> start_{};
};

/// The name of a process, as /proc or else NVML has it; empty if nobody says.
void name_process(uint32_t pid, char* name, size_t size) noexcept;

}  // namespace oomdiag
