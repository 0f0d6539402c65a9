#include "extension/virtual_device/driver/devices.h"

#include <pthread.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string_view>

#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/neighbours.h"
#include "extension/virtual_device/driver/uuid.h"

namespace oomdiag {
namespace {

// One card for now; several come as several entries of OOMDIAG_CARD, and everything below is written for a list.
constexpr size_t kMostDevices = 16;

// Never destroyed: programs free device memory in their own static destructors, after ours would have run.
auto& all_devices = *new std::array<Device, kMostDevices>;
std::atomic<size_t> device_count = 0;
std::atomic<CUresult> initialized = CUDA_ERROR_NOT_INITIALIZED;
std::atomic<bool> forked = false;
thread_local Device* current = nullptr;

/// A card file's number may be overridden by a size in bytes: OOMDIAG_MEMORY.
void override_memory(Card& card) {
  const char* text = std::getenv("OOMDIAG_MEMORY");
  if (!text || !*text) return;
  char* end = nullptr;
  const long long bytes = std::strtoll(text, &end, 10);
  if (*end || bytes <= 0) throw std::runtime_error("OOMDIAG_MEMORY is not a number of bytes");
  card.total_bytes = bytes;
}

void read_device(Device& device, int ordinal, const std::string& path) {
  device.ordinal = ordinal;
  device.card = read_card(path);
  override_memory(device.card);
  device.used_bytes = neighbour_bytes(ordinal);
  device.cudnn_description = describe_for_cudnn(device.card);
  const char* architectures = std::getenv("OOMDIAG_ARCHITECTURES");
  device.architecture = pick_architecture(device.card, architectures ? architectures : OOMDIAG_BUILT_ARCHITECTURES);
}

/// The number of devices that CUDA_VISIBLE_DEVICES leaves of `present`: it counts up to the first entry that names none
/// (CUDA programming guide, environment variables).
size_t count_visible(size_t present) {
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) return present;
  size_t visible = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string entry(rest.substr(0, rest.find(',')));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    char* end = nullptr;
    const long ordinal = std::strtol(entry.c_str(), &end, 10);
    const bool is_ordinal = end != entry.c_str() && !*end && ordinal >= 0 && static_cast<size_t>(ordinal) < present;
    if (!is_ordinal && !names_uuid(entry, present)) break;
    ++visible;
  }
  return std::min(visible, present);
}

CUresult load_devices() {
  const char* path = std::getenv("OOMDIAG_CARD");
  try {
    if (!path || !*path) throw std::runtime_error("OOMDIAG_CARD names no card file");
    read_device(all_devices[0], 0, path);
    device_count = count_visible(1);
  } catch (const std::exception& reason) {
    std::fprintf(stderr, "oomdiag: no virtual device: %s%s%s\n", path ? path : "", path ? ": " : "", reason.what());
  }
  return device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

}  // namespace

CUresult initialize_devices() {
  static std::once_flag once;
  if (forked) return CUDA_ERROR_NOT_INITIALIZED;  // before the flag: another thread may have held it at the fork
  std::call_once(once, [] {
    initialized = load_devices();
    pthread_atfork(nullptr, nullptr, [] { forked = initialized == CUDA_SUCCESS; });
  });
  return initialized;
}

CUresult check_initialized() noexcept { return forked ? CUDA_ERROR_NOT_INITIALIZED : initialized.load(); }

std::span<Device> devices() noexcept { return {all_devices.data(), device_count}; }

Device* find_device(int ordinal) noexcept {
  return ordinal >= 0 && static_cast<size_t>(ordinal) < device_count ? &all_devices[static_cast<size_t>(ordinal)]
                                                                     : nullptr;
}

Device* current_device() noexcept { return current; }

void set_current_device(Device* device) noexcept { current = device; }

std::mutex& memory_lock() noexcept {
  static auto& lock = *new std::mutex;
  return lock;
}

void make_context(Device& device) {
  if (device.has_context.load(std::memory_order_acquire)) return;
  {
    std::lock_guard guard(memory_lock());
    if (device.has_context.exchange(true)) return;
    device.used_bytes += device.card.context_bytes;
  }
  tell_resource(CUPTI_CBID_RESOURCE_CONTEXT_CREATED, &device);
}

void load_kernels(Device& device) {
  if (device.has_kernels.load(std::memory_order_acquire)) return;
  make_context(device);
  {
    std::lock_guard guard(memory_lock());
    if (device.has_kernels.exchange(true)) return;
    device.used_bytes += device.card.first_kernel_bytes;
  }
  tell_resource(CUPTI_CBID_RESOURCE_MODULE_LOADED, &device);
}

bool charge(Device& device, int64_t bytes) noexcept {
  if (bytes > device.card.total_bytes - device.used_bytes) return false;
  device.used_bytes += bytes;
  return true;
}

void refund(Device& device, int64_t bytes) noexcept { device.used_bytes -= bytes; }

}  // namespace oomdiag
