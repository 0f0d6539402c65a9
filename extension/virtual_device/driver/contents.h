#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "extension/virtual_device/driver/locks.h"

// What is known of the contents of the GPUs. Kernels do nothing, so all that can be known is what the host wrote: index
// tensors, constants, the counts that DDP compares. It must read back, or programs that look at their own numbers go
// astray. Everything else reads as zeros, and a read of it is noted as one of what a kernel wrote (notes.cpp).
//
// Known ranges lie in a map by address: bytes, or one number that fills the range, however long it is. A copy above
// kMaxPieceBytes is bulk data, a batch or a weight, which no program branches on: it is known to be the host's, and its bytes
// are not kept. When all kept bytes together pass kMaxBytes, the largest are dropped, so that the host needs little memory
// however large the GPU is.
//
// What another process sends is promised: whoever looks at it waits, and nobody else does.
//
// A block that the caching allocator hands to a new owner must be forgotten (torch/forget.cpp): read as a size, what the
// host wrote for the last owner would be worse than zero.

namespace oomdiag {

inline constexpr size_t kMaxPieceBytes = 4 << 20;
inline constexpr size_t kMaxBytes = 256 << 20;

/// A number of 1, 2, 4, 8 or 16 bytes that fills a range: the shortest that does.
class Pattern {
 public:
  Pattern() = default;
  Pattern(const void* number, size_t bytes);

  size_t bytes() const { return bytes_; }
  /// Writes `bytes` of it, of which the first is the number's byte `from`.
  void repeat(void* to, size_t from, size_t bytes) const;

 private:
  std::array<char, 16> number_{};
  size_t bytes_ = 1;
};

/// What is known of the numbers in a range.
enum class Uniformity {
  mixed,    ///< they differ
  known,    ///< all are one that the host wrote, or that follows from what it wrote
  guess,    ///< all are one that was guessed
  dropped,  ///< the host wrote them, and they were not kept
  unknown,  ///< of some nothing is known
};

/// How the bytes of a range came about. Of several, the last named in this order is reported.
enum class Origin { host, dropped, kernel };

/// Bytes that are on their way from another process. From any thread.
class Promise {
 public:
  using Fetch = bool (*)(void* context, void* into);

  Promise(size_t bytes, Fetch fetch, std::shared_ptr<void> context)
      : bytes_(bytes), fetch_(fetch), context_(std::move(context)) {}
  size_t bytes() const { return bytes_; }
  /// The bytes, which may have to be waited for; null where they are not known.
  const char* wait();

 private:
  size_t bytes_;
  Fetch fetch_;
  std::shared_ptr<void> context_;
  std::once_flag once_;
  std::vector<char> data_;
};

/// All functions from any thread.
class Contents {
 public:
  /// What the host wrote, or what is taken for a kernel's.
  void write(uintptr_t to, const void* from, size_t bytes, Origin origin = Origin::host);
  void fill(uintptr_t to, const Pattern& pattern, size_t bytes, Origin origin = Origin::host);
  void forget(uintptr_t at, size_t bytes);
  /// What holds `at`, as far as it was written at once.
  void forget_whole(uintptr_t at);
  void promise(uintptr_t to, std::shared_ptr<Promise> promise);

  /// Device to device.
  void copy(uintptr_t to, uintptr_t from, size_t bytes);

  Origin origin(uintptr_t from, size_t bytes);

  /// Whether numbers of `number_bytes` are all one, which is written to `number`. Waits for what is promised.
  Uniformity look(uintptr_t from, size_t bytes, void* number, size_t number_bytes);

  /// Gives what is known, and zeros for the rest, which `clear` writes first. Waits for what is promised.
  Origin read(uintptr_t from, void* to, size_t bytes, void (*clear)(void* to, size_t bytes) = clear_by_writing);
  static void clear_by_writing(void* to, size_t bytes);

 private:
  struct Piece {
    size_t bytes = 0;
    std::vector<char> data{};  ///< empty: `pattern`, from its byte `phase` on
    Pattern pattern{};
    size_t phase = 0;
    bool is_dropped = false;
    bool is_guess = false;
    std::shared_ptr<Promise> promise{};  ///< what it will be, from `offset` on
    size_t offset = 0;
  };
  using Pieces = std::map<uintptr_t, Piece>;

  static Piece cut(const Piece& piece, size_t from, size_t bytes);
  Pieces::iterator first_overlap(uintptr_t at);
  template <typename Use>
  void for_overlaps(uintptr_t from, size_t bytes, Use use);
  void erase(uintptr_t at, size_t bytes);
  void add(uintptr_t at, Piece piece);
  void drop(Piece& piece);
  void keep_within_bounds();
  std::unique_lock<ContentsLock> settle(uintptr_t from, size_t bytes);
  Origin find_origin(uintptr_t from, size_t bytes);
  std::shared_ptr<Promise> find_promise(uintptr_t from, size_t bytes);

  ContentsLock lock_;
  Pieces pieces_;
  size_t kept_bytes_ = 0;
};

}  // namespace oomdiag
