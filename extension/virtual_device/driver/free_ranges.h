#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace oomdiag {

/// Free pieces of address space, side by side pieces joined. Which piece serves a request is the caller's choice: memory of
/// a GPU is handed out from high addresses down, as Linux drivers do, and PyTorch's best fit breaks ties by address.
class FreeRanges {
 public:
  /// Pieces are not joined across multiples of `border`; 0: wherever they touch.
  explicit FreeRanges(uintptr_t border = 0) : border_(border) {}

  /// The highest place with space for `bytes`; nullopt where there is none.
  std::optional<uintptr_t> take_highest(uintptr_t bytes);
  /// The lowest one.
  std::optional<uintptr_t> take_lowest(uintptr_t bytes);

  /// Adds a piece, which must not overlap another; gives the piece that it is part of now.
  struct Range {
    uintptr_t begin = 0;
    uintptr_t bytes = 0;

    bool operator==(const Range&) const = default;
  };
  Range give(uintptr_t begin, uintptr_t bytes);

  /// Takes out a piece that `give` returned.
  void remove(const Range& range) { free_.erase(range.begin); }

 private:
  using Pieces = std::map<uintptr_t, uintptr_t>;  ///< bytes by beginning
  bool may_join(uintptr_t at) const { return border_ == 0 || at % border_ != 0; }

  uintptr_t border_;
  Pieces free_;
};

}  // namespace oomdiag
