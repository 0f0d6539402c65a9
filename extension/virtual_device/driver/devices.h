#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "extension/virtual_device/driver/card.h"

namespace oomdiag {

/// The most cards that a machine may have.
inline constexpr size_t kMostDevices = 16;

/// One card of the machine. `used_bytes` changes under `memory_lock()`; its context stays once it is made.
struct Device {
  int index = 0;     ///< its place in the machine, which NVML counts by: what its bus id and uuid are made of
  int ordinal = -1;  ///< what this process calls it; -1 where CUDA_VISIBLE_DEVICES hides it
  Card card;
  std::string cudnn_description;
  int architecture = 0;
  std::atomic<bool> has_context = false;
  std::atomic<bool> has_kernels = false;
  std::atomic<uint32_t> peers = 0;           ///< a bit for each ordinal whose memory it may reach
  std::atomic<int64_t> used_bytes = 0;       ///< by this process
  std::atomic<int64_t> end_ns = 0;           ///< clock.h: when all its work will be done,
  std::atomic<int64_t> legacy_end_ns = 0;    ///< that on its legacy stream,
  std::atomic<int64_t> blocking_end_ns = 0;  ///< and that on the streams which wait for the legacy stream
};

/// Reads OOMDIAG_CARD (card files, one per line), OOMDIAG_MEMORY and CUDA_VISIBLE_DEVICES, once. cuInit's answer: success, or no device (one line
/// on stderr says why), or not initialised in a child forked from a process that used CUDA, as on a real card.
CUresult initialize_devices();

/// The answer that cuInit gave; CUDA_ERROR_NOT_INITIALIZED before it.
CUresult check_initialized() noexcept;

/// The number of visible devices; 0 before initialize_devices().
int count_devices() noexcept;

/// The visible device of that ordinal, null when there is none.
Device* find_device(int ordinal) noexcept;

/// The card at that place in the machine, visible or not; null when there is none.
Device* find_installed(int index) noexcept;

/// The device of the thread's current context, null when it has none.
Device* current_device() noexcept;
void set_current_device(Device* device) noexcept;

/// Makes the device's context: properties and device count must not on a real card.
void make_context(Device& device);

/// The first kernel or library handle takes its share of the card.
void load_kernels(Device& device);

/// Guards the accounts and the tables of memory.
std::mutex& memory_lock() noexcept;

/// Takes `bytes` from the device; false when it has not so many left, by this process and the others (shared_cards.h).
/// Under memory_lock().
bool charge(Device& device, int64_t bytes) noexcept;
void refund(Device& device, int64_t bytes) noexcept;

/// What is taken of the card by all processes.
int64_t count_used_bytes(const Device& device) noexcept;

}  // namespace oomdiag
