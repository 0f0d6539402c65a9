#pragma once

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

namespace oomdiag {

/// The made-up identity of a virtual device, the same in the driver, the runtime and NVML: all bytes 0x11 but the last,
/// its place in the machine.
inline void write_uuid(char (&bytes)[16], int index) {
  std::memset(bytes, 0x11, sizeof bytes);
  bytes[15] = static_cast<char>(index);
}

inline std::string format_uuid(int index) {
  char text[48];
  std::snprintf(text, sizeof text, "GPU-11111111-1111-1111-1111-1111111111%02x", static_cast<unsigned>(index) & 0xffu);
  return text;
}

/// The place of the device whose identity begins with `text`, as CUDA_VISIBLE_DEVICES allows; -1 for none of `count`.
inline int find_uuid(const std::string& text, size_t count) {
  if (!text.starts_with("GPU-")) return -1;
  for (size_t i = 0; i < count; ++i) {
    if (format_uuid(static_cast<int>(i)).starts_with(text)) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace oomdiag
