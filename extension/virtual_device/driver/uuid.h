#pragma once

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

namespace oomdiag {

/// The made-up identity of a virtual device, the same in the driver, the runtime and NVML: all bytes 0x11 but the last,
/// its ordinal.
inline void write_uuid(char (&bytes)[16], int ordinal) {
  std::memset(bytes, 0x11, sizeof bytes);
  bytes[15] = static_cast<char>(ordinal);
}

inline std::string format_uuid(int ordinal) {
  char text[48];
  std::snprintf(text, sizeof text, "GPU-11111111-1111-1111-1111-1111111111%02x",
                static_cast<unsigned>(ordinal) & 0xffu);
  return text;
}

/// Whether `text` is the beginning of the identity of one of the first `count` devices, as CUDA_VISIBLE_DEVICES allows.
inline bool names_uuid(const std::string& text, size_t count) {
  if (!text.starts_with("GPU-")) return false;
  for (size_t i = 0; i < count; ++i) {
    if (format_uuid(static_cast<int>(i)).starts_with(text)) return true;
  }
  return false;
}

}  // namespace oomdiag
