#include "extension/virtual_device/driver/stream.h"

#include <array>

namespace oomdiag {

StreamsLock& stream_lock() noexcept {
  static auto& lock = *new StreamsLock;
  return lock;
}

Stream* find_stream(CUstream handle) noexcept {
  if (reinterpret_cast<uintptr_t>(handle) > reinterpret_cast<uintptr_t>(CU_STREAM_PER_THREAD)) {
    return reinterpret_cast<Stream*>(handle);
  }
  static auto& default_streams = *new std::array<Stream, kMostDevices>;
  Device* device = current_device();
  if (!device) return nullptr;
  Stream& stream = default_streams[static_cast<size_t>(device->ordinal)];
  stream.device = device;
  return &stream;
}

}  // namespace oomdiag
