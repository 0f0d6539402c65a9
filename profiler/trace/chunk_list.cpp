#include "profiler/trace/chunk_list.h"

namespace oomdiag {

ChunkList::ChunkList(uint32_t chunks, uint32_t slots)
    : count_(chunks), slots_(slots), chunks_(std::make_unique<Chunk[]>(chunks)) {}

std::optional<ChunkList::Taken> ChunkList::take() noexcept {
  if (rests_.load(std::memory_order_relaxed) > 0) {
    if (const auto rest = take_rest()) return rest;
  }
  uint32_t fresh = fresh_.load(std::memory_order_relaxed);
  while (fresh < count_ && !fresh_.compare_exchange_weak(fresh, fresh + 1, std::memory_order_relaxed)) {
  }
  if (fresh == count_) return take_oldest();
  chunks_[fresh].newest.store(kHeld, std::memory_order_relaxed);
  return Taken{.chunk = fresh, .used = 0, .is_fresh = true};
}

std::optional<ChunkList::Taken> ChunkList::take_rest() noexcept {
  const uint32_t used_before = fresh_.load(std::memory_order_relaxed);
  for (uint32_t c = 0; c < used_before; ++c) {
    Chunk& chunk = chunks_[c];
    uint64_t newest = chunk.newest.load(std::memory_order_relaxed);
    if (newest == kHeld || newest == 0 || chunk.used.load(std::memory_order_relaxed) >= slots_) continue;
    if (!chunk.newest.compare_exchange_strong(newest, kHeld, std::memory_order_acquire)) continue;
    const uint32_t used = chunk.used.load(std::memory_order_relaxed);
    if (used < slots_) {
      rests_.fetch_sub(1, std::memory_order_relaxed);
      return Taken{.chunk = c, .used = used};
    }
    chunk.newest.store(newest, std::memory_order_release);  // somebody else filled it in between
  }
  return {};
}

std::optional<ChunkList::Taken> ChunkList::take_oldest() noexcept {
  constexpr int kMaxTries = 64;
  for (int tries = 0; tries < kMaxTries; ++tries) {
    uint64_t oldest = kHeld;
    uint32_t found = 0;
    for (uint32_t c = 0; c < count_; ++c) {
      const uint64_t newest = chunks_[c].newest.load(std::memory_order_relaxed);
      if (newest < oldest && newest != 0) oldest = newest, found = c;
    }
    if (oldest == kHeld) return {};
    if (!chunks_[found].newest.compare_exchange_strong(oldest, kHeld, std::memory_order_acquire)) continue;
    if (chunks_[found].used.load(std::memory_order_relaxed) < slots_) rests_.fetch_sub(1, std::memory_order_relaxed);
    return Taken{.chunk = found};
  }
  return {};
}

void ChunkList::release(uint32_t chunk, uint32_t used, uint64_t newest) noexcept {
  chunks_[chunk].used.store(used, std::memory_order_relaxed);
  if (used < slots_) rests_.fetch_add(1, std::memory_order_relaxed);
  chunks_[chunk].newest.store(newest == 0 ? 1 : newest, std::memory_order_release);
}

}  // namespace oomdiag
