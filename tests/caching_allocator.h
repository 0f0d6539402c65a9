#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>

#include "profiler/event.h"

namespace oomdiag {

/// A small model of PyTorch's caching allocator for tests, written from its description (pytorch-hooks.md §2.2) and not
/// from the replay: plain ordered maps and linear searches. It emits what it does as events.
class SimulatedAllocator {
 public:
  struct Settings {
    int64_t gpu_bytes = int64_t{1} << 40;
    bool expandable = false;
    int64_t divisions = 0;  ///< roundup_power2_divisions
    int64_t max_split_bytes = int64_t{1} << 60;
  };

  SimulatedAllocator(Settings settings, std::function<void(Event)> emit)
      : settings_(settings), emit_(std::move(emit)) {}

  /// The address of a new block, or nothing when the GPU is full even after giving back the cache.
  std::optional<uint64_t> allocate(int64_t bytes, uint64_t stream = 0);
  void request_free(uint64_t address);
  void complete_free(uint64_t address);
  void free(uint64_t address) {
    request_free(address);
    complete_free(address);
  }
  /// Gives back what is wholly free.
  void empty_cache();
  /// Adds a wholly free segment of this size.
  uint64_t add_segment(int64_t bytes, uint64_t stream = 0);
  /// Emits its layout as segment_state and block_state events.
  void describe() const;

  int64_t round(int64_t bytes) const;
  int64_t segment_bytes(int64_t rounded) const;
  int64_t allocated_bytes() const;
  int64_t pending_bytes() const;
  int64_t reserved_bytes() const { return reserved_; }
  int64_t free_on_gpu() const { return settings_.gpu_bytes - reserved_; }

 private:
  enum class State { free, live, pending };
  struct Piece {
    int64_t bytes = 0, requested = 0;
    State state = State::free;
    uint64_t segment = 0;  ///< where its segment (or reserved range) begins
    uint64_t stream = 0;
    bool small = false;
  };
  using Pieces = std::map<uint64_t, Piece>;

  Pieces::iterator find_fit(int64_t bytes, uint64_t stream, bool small);
  Pieces::iterator spare_growing(Pieces::iterator best, int64_t bytes);
  Pieces::iterator grow(int64_t bytes, uint64_t stream, bool small);
  Pieces::iterator map_more(int64_t bytes, uint64_t stream, bool small);
  Pieces::iterator insert_free(uint64_t address, Piece piece);
  void emit(EventKind kind, uint64_t address, int64_t bytes, uint64_t stream) const;
  void give_back(Pieces::iterator piece);
  void unmap_pages(Pieces::iterator piece);

  Settings settings_;
  std::function<void(Event)> emit_;
  Pieces pieces_;
  std::map<uint64_t, int64_t> segments_;                  ///< of those that are not expandable
  std::map<std::pair<uint64_t, bool>, uint64_t> ranges_;  ///< expandable: reserved range by stream and pool
  uint64_t next_address_ = 0x7f0000000000;
  int64_t reserved_ = 0;
};

}  // namespace oomdiag
