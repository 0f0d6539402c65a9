#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace oomdiag {

/// Moves every second of `entries`, the first among them, to the front, and gives how many these are.
template <class T>
size_t keep_every_second(std::span<T> entries) {
  const size_t kept = (entries.size() + 1) / 2;
  for (size_t i = 1; i < kept; ++i) entries[i] = std::move(entries[2 * i]);
  return kept;
}

/// Of a row whose length is not known before, the first entry and evenly spaced others: all, and once they are `most`, an
/// even number, every 2nd, 4th, …
template <class T>
class EvenlySpaced {
 public:
  explicit EvenlySpaced(size_t most) : most_(most) {}

  /// The place of the next entry, null if it is not among them.
  T* next() {
    if ((seen_++ & (stride_ - 1)) != 0) return nullptr;  // a division would be felt
    if (entries_.size() == most_) {
      entries_.resize(keep_every_second(std::span(entries_)));
      stride_ *= 2;
    }
    return &entries_.emplace_back();
  }

  const std::vector<T>& entries() const { return entries_; }

 private:
  size_t most_;
  std::vector<T> entries_;
  uint64_t stride_ = 1;  ///< a power of two
  uint64_t seen_ = 0;
};

}  // namespace oomdiag
