#include "profiler/explain/arena.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "profiler/replay/allocator/rounding.h"

// The allocator in a page: best fit among the free blocks of a pool, else a new segment; when the card is full, segments that
// are wholly free go back to it (c10/cuda/CUDACachingAllocator.cpp).

namespace oomdiag {
namespace {

class Arena {
 public:
  Arena(int64_t room_bytes, const AllocatorSettings& settings) : room_(room_bytes), settings_(settings) {}

  /// The address of a block, or nothing where it is refused.
  std::optional<uint64_t> allocate(int64_t bytes) {
    const int64_t rounded = round_size(std::max<int64_t>(1, bytes), {});
    const bool small = rounded <= kSmallBytes;
    auto& pool = free_[small ? 0 : 1];
    auto found = pool.lower_bound({rounded, 0});
    if (found == pool.end()) {
      if (!add_segment(segment_size(rounded, settings_), small)) return {};
      found = pool.lower_bound({rounded, 0});
    }
    const uint64_t address = found->second;
    pool.erase(found);
    Piece& piece = pieces_.at(address);
    piece.used = true;
    const int64_t rest = piece.bytes - rounded;
    if (splits(rounded, rest, small, false, settings_)) {
      piece.bytes = rounded;
      const uint64_t next = address + static_cast<uint64_t>(rounded);
      pieces_[next] = {.bytes = rest, .segment = piece.segment, .small = small};
      pool.insert({rest, next});
    }
    return address;
  }

  void free(uint64_t address) {
    auto piece = pieces_.find(address);
    auto& pool = free_[piece->second.small ? 0 : 1];
    piece->second.used = false;
    const auto next = std::next(piece);
    if (next != pieces_.end() && !next->second.used && next->second.segment == piece->second.segment) {
      pool.erase({next->second.bytes, next->first});
      piece->second.bytes += next->second.bytes;
      pieces_.erase(next);
    }
    if (piece != pieces_.begin()) {
      const auto before = std::prev(piece);
      if (!before->second.used && before->second.segment == piece->second.segment) {
        pool.erase({before->second.bytes, before->first});
        before->second.bytes += piece->second.bytes;
        pieces_.erase(piece);
        piece = before;
      }
    }
    pool.insert({piece->second.bytes, piece->first});
  }

 private:
  struct Piece {
    int64_t bytes = 0;
    uint64_t segment = 0;  ///< its address
    bool small = false, used = false;
  };

  bool add_segment(int64_t bytes, bool small) {
    if (reserved_ + bytes > room_) release();
    if (reserved_ + bytes > room_) return false;
    reserved_ += bytes;
    pieces_[end_] = {.bytes = bytes, .segment = end_, .small = small};
    segments_[end_] = bytes;
    free_[small ? 0 : 1].insert({bytes, end_});
    end_ += static_cast<uint64_t>(bytes);
    return true;
  }

  void release() {
    for (auto segment = segments_.begin(); segment != segments_.end();) {
      const auto piece = pieces_.find(segment->first);
      if (piece->second.used || piece->second.bytes != segment->second) {
        ++segment;
        continue;
      }
      reserved_ -= segment->second;
      free_[piece->second.small ? 0 : 1].erase({segment->second, segment->first});
      pieces_.erase(piece);
      segment = segments_.erase(segment);
    }
  }

  int64_t room_, reserved_ = 0;
  AllocatorSettings settings_;
  uint64_t end_ = 0;
  std::map<uint64_t, Piece> pieces_;      ///< by address
  std::map<uint64_t, int64_t> segments_;  ///< bytes by address
  std::set<std::pair<int64_t, uint64_t>> free_[2];
};

/// Something that happens to a block.
struct Change {
  uint32_t position = 0;
  bool birth = false;
  size_t block = 0;
};

// Frees come first: a block whose death lies where another is born makes room for it.
std::vector<Change> order(const Lives& blocks) {
  std::vector<Change> changes;
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (blocks[b].bytes <= 0 || blocks[b].died <= blocks[b].born) continue;
    changes.push_back({blocks[b].born, true, b});
    if (blocks[b].died != BlockLife::kNever) changes.push_back({blocks[b].died, false, b});
  }
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
    return a.position != b.position ? a.position < b.position : !a.birth && b.birth;
  });
  return changes;
}

// What a first step finds: no gradients, and optimizer state only once its optimizer runs.
Lives first_step_of(Lives blocks) {
  uint32_t optimizer = 0, end = 0;
  for (const BlockLife& block : blocks) {
    if (block.phase == Phase::optimizer && block.is_of_step() && optimizer == 0) optimizer = block.born;
    end = std::max(end, block.died == BlockLife::kNever ? block.born : block.died);
  }
  for (BlockLife& block : blocks) {
    if (block.is_of_step()) continue;
    if (block.category == Category::gradient) block.bytes = 0;
    if (block.category == Category::optimizer_state) block.born = optimizer == 0 ? end : optimizer;
  }
  return blocks;
}

/// A step in an arena in which some of its blocks may live already.
bool run(Arena& arena, const Lives& blocks, std::vector<std::optional<uint64_t>>& at) {
  for (const Change& change : order(blocks)) {
    std::optional<uint64_t>& address = at[change.block];
    if (!change.birth) {
      if (address) arena.free(*address);
      address.reset();
    } else if (!address) {
      address = arena.allocate(blocks[change.block].bytes);
      if (!address) return false;
    }
  }
  return true;
}

}  // namespace

bool gets_through(const Lives& blocks, int64_t room_bytes, const AllocatorSettings& settings) {
  if (find_peak(blocks) > room_bytes) return false;
  if (settings.expandable_segments) return find_peak(blocks) + 2 * settings.large_segment_bytes <= room_bytes;
  if (blocks.size() > kMostSimulated) return true;
  Arena arena(room_bytes, settings);
  std::vector<std::optional<uint64_t>> at(blocks.size());
  if (!run(arena, first_step_of(blocks), at)) return false;
  // What the step itself made and kept goes, as the next one makes it anew.
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (!blocks[b].is_of_step() || !at[b]) continue;
    arena.free(*at[b]);
    at[b].reset();
  }
  return run(arena, blocks, at);
}

bool fits_safely(const Lives& blocks, int64_t room_bytes, const AllocatorSettings& settings) {
  return gets_through(blocks, room_bytes - room_bytes / 64, settings);
}

}  // namespace oomdiag
