#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string_view>

namespace oomdiag {

inline constexpr int64_t kKiB = 1024;
inline constexpr int64_t kMiB = 1024 * kKiB;
inline constexpr int64_t kGiB = 1024 * kMiB;

/// The settings of PyTorch's caching allocator that decide sizes, as in PYTORCH_CUDA_ALLOC_CONF
/// (c10/core/AllocatorConfig.h). Defaults are PyTorch's own.
struct AllocatorSettings {
  bool expandable_segments = false;
  int64_t large_segment_bytes = 20 * kMiB;
  int64_t max_split_bytes = std::numeric_limits<int64_t>::max();
  double memory_fraction = 1;  ///< of the GPU that the process may reserve
  /// Divisions between powers of two, for sizes from 1 MiB, 2 MiB, … 32 GiB on; 0 = round to 512 bytes.
  std::array<int64_t, 16> roundup_power2_divisions{};

  bool operator==(const AllocatorSettings&) const = default;
};

/// What PyTorch may reserve of a GPU (setMemoryFraction of c10/cuda/CUDACachingAllocator.cpp).
int64_t allowed_bytes(int64_t total_bytes, double memory_fraction);
/// The same where others hold part of it.
int64_t available_bytes(int64_t total_bytes, int64_t non_pytorch_bytes, double memory_fraction);

/// Reads the text of PYTORCH_CUDA_ALLOC_CONF. PyTorch has accepted it already, so what is not understood is left at its
/// default.
AllocatorSettings parse_allocator_settings(std::string_view text);

}  // namespace oomdiag
