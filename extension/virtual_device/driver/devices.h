#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>

#include "extension/virtual_device/driver/card.h"

namespace oomdiag {

/// One visible card. `used_bytes` changes under `memory_lock()`; the flags only ever rise.
struct Device {
  int ordinal = 0;
  Card card;
  std::string cudnn_description;
  int architecture = 0;
  std::atomic<bool> has_context = false;
  std::atomic<bool> has_kernels = false;
  std::atomic<int64_t> used_bytes = 0;
};

/// Reads OOMDIAG_CARD, OOMDIAG_MEMORY and CUDA_VISIBLE_DEVICES, once. cuInit's answer: success, or no device (one line
/// on stderr says why), or not initialised in a child forked from a process that used CUDA, as on a real card.
CUresult initialize_devices();

/// The answer that cuInit gave; CUDA_ERROR_NOT_INITIALIZED before it.
CUresult check_initialized() noexcept;

/// The visible devices; none before initialize_devices().
std::span<Device> devices() noexcept;

/// The device of that ordinal, null when there is none.
Device* find_device(int ordinal) noexcept;

/// The device of the thread's current context, null when it has none.
Device* current_device() noexcept;
void set_current_device(Device* device) noexcept;

/// Makes the device's context: properties and device count must not on a real card.
void make_context(Device& device);

/// The first kernel or library handle takes its share of the card.
void load_kernels(Device& device);

/// Guards the accounts and the tables of memory.
std::mutex& memory_lock() noexcept;

/// Takes `bytes` from the device; false when it has not so many. Under memory_lock().
bool charge(Device& device, int64_t bytes) noexcept;
void refund(Device& device, int64_t bytes) noexcept;

}  // namespace oomdiag
