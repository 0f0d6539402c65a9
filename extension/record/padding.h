#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace oomdiag {

/// What a batch of sequences is filled up with, to be of one length.
struct Padding {
  int64_t longest = 0;    ///< of the sequences, without it
  int64_t per_mille = 0;  ///< of all elements, that is no padding

  bool operator==(const Padding&) const = default;
};

/// Of some rows of a contiguous tensor of at least two dimensions, whose first is the batch: the dimension along which most of it is one value
/// behind each sequence, or before each. `element_bytes` is 1, 2, 4 or 8. nullopt where less than half is padding, or all of it. Of large tensors it takes a
/// few milliseconds.
std::optional<Padding> find_padding(const std::byte* data, size_t element_bytes, std::span<const int64_t> sizes);

}  // namespace oomdiag
