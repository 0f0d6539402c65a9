#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "extension/environment.h"

namespace oomdiag {

/// With which the names of all our variables begin.
inline constexpr std::string_view kOwnPrefix = "OOMDIAG_";

/// The environment that this process was started with: variables, each ended by a NUL.
inline std::string environment_at_start() {
  std::string text;
  const int file = open("/proc/self/environ", O_RDONLY | O_CLOEXEC);
  std::array<char, 4096> part{};
  for (ssize_t count = 0; (count = read(file, part.data(), part.size())) > 0;) {
    text.append(part.data(), static_cast<std::size_t>(count));
  }
  if (file >= 0) close(file);
  return text;
}

/// The value of one of our variables, or null. Where a program has cleared its environment before it uses CUDA, as
/// unittest.mock.patch.dict(os.environ, clear=True) does, it is the one that the process was started with.
inline const char* own_variable(const char* name) noexcept try {
  if (const char* value = std::getenv(name); value != nullptr) return value;
  for (const char* ours : {variables::kOutput, variables::kRecorder, variables::kGpu}) {
    if (std::getenv(ours) != nullptr) return nullptr;  // not cleared: this one was not set
  }
  static const auto& all = *new std::string('\0' + environment_at_start());
  const std::string start = '\0' + std::string(name) + '=';
  const std::size_t found = all.find(start);
  return found == std::string::npos ? nullptr : all.c_str() + found + start.size();
} catch (...) {
  return nullptr;
}

}  // namespace oomdiag
