#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

namespace oomdiag {

/// Which chunks of a trace are taken. It lies in private memory: what a child of fork does with its copy is nothing to its
/// parent. Any thread; neither locks nor allocates.
///
/// A chunk belongs to the thread that took it until that one gives it back. What is left of it then is given to the next
/// thread that asks, so threads that come and go share a few chunks. When all are used, the one whose newest event is the
/// oldest is overwritten: the trace always has the newest events, whoever wrote them.
class ChunkList {
 public:
  struct Taken {
    uint32_t chunk = 0;
    uint32_t used = 0;      ///< slots that hold events which must stay: write after them
    bool is_fresh = false;  ///< never used before
  };

  /// `chunks` of them, each with space for `slots` events.
  ChunkList(uint32_t chunks, uint32_t slots);

  /// A chunk to write to; nothing if threads hold all of them.
  std::optional<Taken> take() noexcept;
  /// Its first `used` slots hold events, the last of which has the sequence `newest`.
  void release(uint32_t chunk, uint32_t used, uint64_t newest) noexcept;

 private:
  static constexpr uint64_t kHeld = ~uint64_t{0};
  std::optional<Taken> take_rest() noexcept;
  std::optional<Taken> take_oldest() noexcept;

  struct Chunk {
    std::atomic<uint64_t> newest = 0;  ///< sequence of its newest event, 0 = never used
    std::atomic<uint32_t> used = 0;
  };
  uint32_t count_;
  uint32_t slots_;
  std::unique_ptr<Chunk[]> chunks_;
  std::atomic<uint32_t> fresh_ = 0;  ///< chunks from this one on were never used
  std::atomic<uint32_t> rests_ = 0;  ///< chunks that were given back with space in them, about
};

}  // namespace oomdiag
