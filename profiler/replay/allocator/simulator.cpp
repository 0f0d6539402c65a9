#include "profiler/replay/allocator/simulator.h"

#include <algorithm>

#include "profiler/replay/allocator/rounding.h"
#include "profiler/replay/allocator/settings.h"

// Segments are rows of pieces that are linked in address order. An expandable segment is one row for each pool that never ends:
// its last piece is unmapped, and stands for all addresses behind.
//
//   segment      [ used ][ free ][ used ][   free   ]
//   expandable   [ used ][ free ][ used ][unmapped ][ free ][ unmapped …
//
// max_split_size's own way of giving back single oversize blocks first is left out: it only changes which of the cached segments
// go first.

namespace oomdiag {
namespace {

constexpr int64_t kEndless = int64_t{1} << 56;
constexpr uint64_t kRangeAddresses = uint64_t{1} << 57;

}  // namespace

AllocatorSimulator::AllocatorSimulator(int64_t available_bytes, const AllocatorSettings& settings)
    : available_bytes_(available_bytes), settings_(settings) {}

uint32_t AllocatorSimulator::allocate(int64_t requested_bytes, uint32_t group) {
  const int64_t rounded = round_size(requested_bytes, settings_);
  const bool small = rounded <= kSmallBytes;
  while (pools_.size() < 2 * (size_t{group} + 1)) pools_.push_back({.small = pools_.size() % 2 == 0});
  const uint32_t pool = 2 * group + (small ? 0 : 1);
  uint32_t piece = find_fit(pools_[pool], rounded);
  if (piece == kNone) piece = grow(pool, rounded);
  if (piece == kNone) {
    ++retries_;
    release_cached();
    piece = grow(pool, rounded);
  }
  if (piece == kNone) return kRefused;
  erase_free(piece);
  pieces_[piece].used = true;
  if (splits(rounded, pieces_[piece].bytes - rounded, small, settings_.expandable_segments, settings_)) {
    insert_free(split(piece, rounded));
  }
  allocated_bytes_ += pieces_[piece].bytes;
  peak_allocated_bytes_ = std::max(peak_allocated_bytes_, allocated_bytes_);
  return piece;
}

void AllocatorSimulator::request_free(uint32_t block) { allocated_bytes_ -= pieces_[block].bytes; }

void AllocatorSimulator::complete_free(uint32_t block) {
  pieces_[block].used = false;
  insert_free(merge(block));
}

void AllocatorSimulator::release_cached() {
  std::vector<uint32_t> cached;
  for (const Pool& pool : pools_) {
    for (const auto& [key, piece] : pool.free) cached.push_back(piece);
  }
  for (const uint32_t piece : cached) {
    if (settings_.expandable_segments) {
      unmap(piece);
    } else if (pieces_[piece].previous == kNone && pieces_[piece].next == kNone) {
      erase_free(piece);
      reserved_bytes_ -= pieces_[piece].bytes;
      unused_.push_back(piece);
    }
  }
}

// The smallest free piece that is large enough, the lowest address on ties; PyTorch's get_free_block.
uint32_t AllocatorSimulator::find_fit(const Pool& pool, int64_t bytes) const {
  auto found = std::lower_bound(pool.free.begin(), pool.free.end(), FreePiece{bytes, 0},
                                [](const auto& one, const FreePiece& key) { return one.first < key; });
  if (found == pool.free.end()) return kNone;
  if (settings_.expandable_segments) {
    for (auto next = found + 1;
         next != pool.free.end() && bytes_after_growth(next->second) < bytes_after_growth(found->second); ++next) {
      found = next;
    }
    return found->second;
  }
  const int64_t has = found->first.first;
  if (bytes < settings_.max_split_bytes && has >= settings_.max_split_bytes) return kNone;
  if (bytes >= settings_.max_split_bytes && has >= bytes + settings_.large_segment_bytes) return kNone;
  return found->second;
}

// "Best" counts what a piece could become: the one before unmapped addresses is kept for large requests.
int64_t AllocatorSimulator::bytes_after_growth(uint32_t piece) const {
  const uint32_t next = pieces_[piece].next;
  const bool grows = next != kNone && !pieces_[next].mapped;
  return pieces_[piece].bytes + (grows ? pieces_[next].bytes : 0);
}

uint32_t AllocatorSimulator::grow(uint32_t pool, int64_t bytes) {
  return settings_.expandable_segments ? grow_range(pool, bytes) : add_segment(pool, segment_size(bytes, settings_));
}

bool AllocatorSimulator::reserve(int64_t bytes) {
  if (reserved_bytes_ + bytes > available_bytes_) return false;
  reserved_bytes_ += bytes;
  peak_reserved_bytes_ = std::max(peak_reserved_bytes_, reserved_bytes_);
  return true;
}

uint32_t AllocatorSimulator::add_segment(uint32_t pool, int64_t bytes) {
  if (!reserve(bytes)) return kNone;
  const uint32_t piece = add({.address = end_, .bytes = bytes, .pool = pool});
  end_ += static_cast<uint64_t>(bytes);
  insert_free(piece);
  return piece;
}

// The first row of free and unmapped pieces that has room: try_allocate_expandable_block.
uint32_t AllocatorSimulator::grow_range(uint32_t pool, int64_t bytes) {
  if (pools_[pool].range == kNone) {
    pools_[pool].range = add({.address = end_, .bytes = kEndless, .pool = pool, .mapped = false});
    end_ += kRangeAddresses;
  }
  for (uint32_t at = pools_[pool].range; at != kNone; at = pieces_[at].next) {
    if (pieces_[at].mapped) continue;
    uint32_t first = is_free(pieces_[at].previous) ? pieces_[at].previous : at;
    int64_t has = 0;
    for (uint32_t i = first; is_free(i) && has < bytes; i = pieces_[i].next) has += pieces_[i].bytes;
    if (has < bytes) continue;
    if (!pieces_[first].mapped) {
      if (!map(first, std::min(pieces_[first].bytes, bytes))) return kNone;
      first = merge(first);
      insert_free(first);
    }
    while (pieces_[first].bytes < bytes) {
      const uint32_t next = pieces_[first].next;
      if (!map(next, std::min(bytes - pieces_[first].bytes, pieces_[next].bytes))) return kNone;
      first = merge(next);
      insert_free(first);
    }
    return first;
  }
  return kNone;
}

// Whole pages at the front of an unmapped piece.
bool AllocatorSimulator::map(uint32_t piece, int64_t bytes) {
  const int64_t page = page_bytes(pieces_[piece].pool);
  const int64_t pages = (bytes + page - 1) / page * page;
  if (!reserve(pages)) return false;
  if (pages < pieces_[piece].bytes) split(piece, pages);
  pieces_[piece].mapped = true;
  return true;
}

// Whole pages inside of a free piece go back; what is left of it at both ends stays.
void AllocatorSimulator::unmap(uint32_t piece) {
  const auto page = static_cast<uint64_t>(page_bytes(pieces_[piece].pool));
  const uint64_t base = pieces_[pools_[pieces_[piece].pool].range].address;
  const uint64_t address = pieces_[piece].address - base, end = address + static_cast<uint64_t>(pieces_[piece].bytes);
  const uint64_t first = (address + page - 1) / page * page, last = end / page * page;
  if (first >= last) return;
  erase_free(piece);
  uint32_t middle = piece;
  if (first > address) {
    middle = split(piece, static_cast<int64_t>(first - address));
    insert_free(piece);
  }
  if (end > last) insert_free(split(middle, static_cast<int64_t>(last - first)));
  reserved_bytes_ -= static_cast<int64_t>(last - first);
  pieces_[middle].mapped = false;
  merge(middle);
}

/// Cuts a piece in two and gives the second, which is free.
uint32_t AllocatorSimulator::split(uint32_t piece, int64_t bytes) {
  const Piece whole = pieces_[piece];
  const uint32_t rest = add({.address = whole.address + static_cast<uint64_t>(bytes),
                             .bytes = whole.bytes - bytes,
                             .pool = whole.pool,
                             .mapped = whole.mapped});
  pieces_[piece].bytes = bytes;
  link(rest, whole.next);
  link(piece, rest);
  return rest;
}

/// Joins a free piece that is in no list with neighbours that are free and as mapped as it is; gives what it is part of.
uint32_t AllocatorSimulator::merge(uint32_t piece) {
  const auto joins = [&](uint32_t other) { return is_free(other) && pieces_[other].mapped == pieces_[piece].mapped; };
  const auto take_next = [&](uint32_t left) {
    const uint32_t right = pieces_[left].next;
    pieces_[left].bytes += pieces_[right].bytes;
    link(left, pieces_[right].next);
    unused_.push_back(right);
  };
  if (const uint32_t next = pieces_[piece].next; joins(next)) {
    if (pieces_[next].mapped) erase_free(next);
    take_next(piece);
  }
  if (const uint32_t previous = pieces_[piece].previous; joins(previous)) {
    if (pieces_[previous].mapped) erase_free(previous);
    take_next(previous);
    return previous;
  }
  return piece;
}

void AllocatorSimulator::insert_free(uint32_t piece) {
  auto& free = pools_[pieces_[piece].pool].free;
  const std::pair<FreePiece, uint32_t> entry{{pieces_[piece].bytes, pieces_[piece].address}, piece};
  free.insert(std::lower_bound(free.begin(), free.end(), entry), entry);
}

void AllocatorSimulator::erase_free(uint32_t piece) {
  auto& free = pools_[pieces_[piece].pool].free;
  const std::pair<FreePiece, uint32_t> entry{{pieces_[piece].bytes, pieces_[piece].address}, piece};
  free.erase(std::lower_bound(free.begin(), free.end(), entry));
}

uint32_t AllocatorSimulator::add(const Piece& piece) {
  if (unused_.empty()) {
    pieces_.push_back(piece);
    return static_cast<uint32_t>(pieces_.size() - 1);
  }
  const uint32_t id = unused_.back();
  unused_.pop_back();
  pieces_[id] = piece;
  return id;
}

void AllocatorSimulator::link(uint32_t left, uint32_t right) {
  pieces_[left].next = right;
  if (right != kNone) pieces_[right].previous = left;
}

}  // namespace oomdiag
