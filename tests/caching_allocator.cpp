#include "tests/caching_allocator.h"

#include <iterator>

namespace oomdiag {
namespace {

constexpr int64_t kMebi = int64_t{1} << 20;

int64_t up_to(int64_t bytes, int64_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

int64_t page_bytes(bool small) { return small ? 2 * kMebi : 20 * kMebi; }

}  // namespace

int64_t SimulatedAllocator::round(int64_t bytes) const {
  if (bytes < 512) return 512;
  if (settings_.divisions > 1 && bytes > 512 * settings_.divisions) {
    int64_t power = 1;
    while (power * 2 <= bytes) power *= 2;
    return up_to(bytes, power / settings_.divisions);
  }
  return up_to(bytes, 512);
}

int64_t SimulatedAllocator::segment_bytes(int64_t rounded) const {
  if (rounded <= kMebi) return 2 * kMebi;
  return rounded < 10 * kMebi ? 20 * kMebi : up_to(rounded, 2 * kMebi);
}

std::optional<uint64_t> SimulatedAllocator::allocate(int64_t bytes, uint64_t stream) {
  const int64_t rounded = round(bytes);
  const bool small = rounded <= kMebi;
  auto found = find_fit(rounded, stream, small);
  if (found == pieces_.end()) found = grow(rounded, stream, small);
  if (found == pieces_.end()) {
    empty_cache();
    found = grow(rounded, stream, small);
  }
  if (found == pieces_.end()) return std::nullopt;

  Piece& piece = found->second;
  const int64_t rest = piece.bytes - rounded;
  const bool splits = small || settings_.expandable ? rest >= 512 : rounded < settings_.max_split_bytes && rest > kMebi;
  if (splits) {
    Piece remainder = piece;
    remainder.bytes = rest;
    piece.bytes = rounded;
    pieces_[found->first + static_cast<uint64_t>(rounded)] = remainder;
  }
  piece.state = State::live;
  piece.requested = bytes;
  emit(EventKind::alloc, found->first, bytes, stream);
  return found->first;
}

void SimulatedAllocator::request_free(uint64_t address) {
  Piece& piece = pieces_.at(address);
  piece.state = State::pending;
  emit(EventKind::free_requested, address, piece.requested, piece.stream);
}

void SimulatedAllocator::complete_free(uint64_t address) {
  const Piece piece = pieces_.at(address);
  emit(EventKind::free_completed, address, piece.requested, piece.stream);
  insert_free(address, piece);
}

void SimulatedAllocator::empty_cache() {
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const auto current = piece++;
    if (current->second.state != State::free) continue;
    if (settings_.expandable) {
      const uint64_t address = current->first;
      unmap_pages(current);
      piece = pieces_.upper_bound(address);
    } else if (const auto segment = segments_.find(current->first);
               segment != segments_.end() && segment->second == current->second.bytes) {
      give_back(current);
    }
  }
}

uint64_t SimulatedAllocator::add_segment(int64_t bytes, uint64_t stream) {
  const uint64_t address = next_address_;
  next_address_ += static_cast<uint64_t>(bytes);  // neighbours in address, which must not merge
  reserved_ += bytes;
  segments_[address] = bytes;
  pieces_[address] = {.bytes = bytes, .segment = address, .stream = stream, .small = bytes == 2 * kMebi};
  emit(EventKind::segment_alloc, address, bytes, stream);
  return address;
}

void SimulatedAllocator::describe() const {
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    // One segment, or one contiguous mapped range.
    auto end = piece;
    int64_t bytes = 0;
    uint64_t next = piece->first;
    for (; end != pieces_.end() && end->first == next && end->second.segment == piece->second.segment; ++end) {
      bytes += end->second.bytes;
      next = end->first + static_cast<uint64_t>(end->second.bytes);
    }
    Event event{
        .address = piece->first, .bytes = bytes, .detail = piece->second.stream, .kind = EventKind::segment_state};
    event.flags = static_cast<uint16_t>((piece->second.small ? 0 : kSegmentLarge) |
                                        (settings_.expandable ? kSegmentExpandable : 0));
    emit_(event);
    for (; piece != end; ++piece) {
      Event block = event;
      block.kind = EventKind::block_state;
      block.address = piece->first;
      block.bytes = piece->second.bytes;
      block.detail = static_cast<uint64_t>(piece->second.requested);
      const State state = piece->second.state;
      block.flags = state == State::live ? kBlockAllocated : state == State::pending ? kBlockPendingFree : 0;
      emit_(block);
    }
  }
}

int64_t SimulatedAllocator::allocated_bytes() const {
  int64_t sum = 0;
  for (const auto& [address, piece] : pieces_) sum += piece.state == State::live ? piece.bytes : 0;
  return sum;
}

int64_t SimulatedAllocator::pending_bytes() const {
  int64_t sum = 0;
  for (const auto& [address, piece] : pieces_) sum += piece.state == State::pending ? piece.bytes : 0;
  return sum;
}

// The smallest sufficient block, of the same stream and pool; the lowest address on ties.
SimulatedAllocator::Pieces::iterator SimulatedAllocator::find_fit(int64_t bytes, uint64_t stream, bool small) {
  auto best = pieces_.end();
  for (auto piece = pieces_.begin(); piece != pieces_.end(); ++piece) {
    const Piece& p = piece->second;
    if (p.state != State::free || p.stream != stream || p.small != small || p.bytes < bytes) continue;
    if (bytes < settings_.max_split_bytes && p.bytes >= settings_.max_split_bytes) continue;
    if (best == pieces_.end() || p.bytes < best->second.bytes) best = piece;
  }
  if (settings_.expandable && best != pieces_.end()) return spare_growing(best, bytes);
  return best;
}

// Among free pieces in the order of their sizes, on from the best: the next one is taken instead as long as it could not grow
// into unmapped addresses and the one before could.
SimulatedAllocator::Pieces::iterator SimulatedAllocator::spare_growing(Pieces::iterator best, int64_t bytes) {
  const auto grown = [&](Pieces::iterator piece) {
    const uint64_t end = piece->first + static_cast<uint64_t>(piece->second.bytes);
    const auto next = std::next(piece);
    if (next != pieces_.end() && next->first == end) return piece->second.bytes;
    const bool open_end = next == pieces_.end() || next->second.segment != piece->second.segment;
    return open_end ? int64_t{1} << 60 : static_cast<int64_t>(next->first - piece->first);
  };
  std::map<std::pair<int64_t, uint64_t>, Pieces::iterator> by_size;
  const Piece& chosen = best->second;
  for (auto piece = pieces_.begin(); piece != pieces_.end(); ++piece) {
    const Piece& p = piece->second;
    const bool serves =
        p.state == State::free && p.stream == chosen.stream && p.small == chosen.small && p.bytes >= bytes;
    if (serves) by_size.emplace(std::pair(p.bytes, piece->first), piece);
  }
  auto found = by_size.begin();
  for (auto next = std::next(found); next != by_size.end() && grown(next->second) < grown(found->second); ++next)
    found = next;
  return found->second;
}

SimulatedAllocator::Pieces::iterator SimulatedAllocator::grow(int64_t bytes, uint64_t stream, bool small) {
  if (settings_.expandable) return map_more(bytes, stream, small);
  const int64_t segment = segment_bytes(bytes);
  if (reserved_ + segment > settings_.gpu_bytes) return pieces_.end();
  return pieces_.find(add_segment(segment, stream));
}

// Maps pages at the first gap whose left neighbour, if free, leaves enough space together with it.
SimulatedAllocator::Pieces::iterator SimulatedAllocator::map_more(int64_t bytes, uint64_t stream, bool small) {
  constexpr uint64_t kRange = uint64_t{1} << 36;
  const auto [range, fresh] = ranges_.try_emplace({stream, small}, next_address_);
  if (fresh) next_address_ += kRange;
  uint64_t at = range->second;
  for (;;) {
    auto piece = pieces_.lower_bound(at);
    while (piece != pieces_.end() && piece->first == at) at += static_cast<uint64_t>((piece++)->second.bytes);
    const bool open_end = piece == pieces_.end() || piece->second.segment != range->second;
    const uint64_t gap_end = open_end ? range->second + kRange : piece->first;
    int64_t have = 0;
    if (piece != pieces_.begin()) {
      const auto before = std::prev(piece);
      const bool adjacent = before->first + static_cast<uint64_t>(before->second.bytes) == at;
      if (adjacent && before->second.state == State::free && before->second.segment == range->second) {
        have = before->second.bytes;
      }
    }
    const int64_t pages = up_to(bytes - have, page_bytes(small));
    if (static_cast<int64_t>(gap_end - at) >= pages) {
      if (reserved_ + pages > settings_.gpu_bytes) return pieces_.end();
      reserved_ += pages;
      emit(EventKind::segment_map, at, pages, stream);
      return insert_free(at, {.bytes = pages, .segment = range->second, .stream = stream, .small = small});
    }
    at = gap_end;
  }
}

SimulatedAllocator::Pieces::iterator SimulatedAllocator::insert_free(uint64_t address, Piece piece) {
  piece.state = State::free;
  piece.requested = 0;
  const auto joins = [&](const Pieces::value_type& left, uint64_t right) {
    return left.second.state == State::free && left.second.segment == piece.segment &&
           left.first + static_cast<uint64_t>(left.second.bytes) == right;
  };
  pieces_[address] = piece;
  auto current = pieces_.find(address);
  if (const auto next = std::next(current); next != pieces_.end() && next->second.state == State::free &&
                                            joins(*current, next->first) && next->second.segment == piece.segment) {
    current->second.bytes += next->second.bytes;
    pieces_.erase(next);
  }
  if (current != pieces_.begin()) {
    if (const auto before = std::prev(current); joins(*before, address)) {
      before->second.bytes += current->second.bytes;
      pieces_.erase(current);
      current = before;
    }
  }
  return current;
}

void SimulatedAllocator::emit(EventKind kind, uint64_t address, int64_t bytes, uint64_t stream) const {
  emit_({.address = address, .bytes = bytes, .detail = stream, .kind = kind});
}

void SimulatedAllocator::give_back(Pieces::iterator piece) {
  emit(EventKind::segment_free, piece->first, piece->second.bytes, piece->second.stream);
  reserved_ -= piece->second.bytes;
  segments_.erase(piece->first);
  pieces_.erase(piece);
}

void SimulatedAllocator::unmap_pages(Pieces::iterator found) {
  const auto [address, piece] = *found;
  const auto page = static_cast<uint64_t>(page_bytes(piece.small));
  const uint64_t end = address + static_cast<uint64_t>(piece.bytes);
  const uint64_t first = piece.segment + (address - piece.segment + page - 1) / page * page;
  const uint64_t last = piece.segment + (end - piece.segment) / page * page;
  if (first >= last) return;
  pieces_.erase(found);
  const auto keep = [&](uint64_t from, uint64_t to) {
    if (from == to) return;
    pieces_[from] = piece;
    pieces_[from].bytes = static_cast<int64_t>(to - from);
  };
  keep(address, first);
  keep(last, end);
  reserved_ -= static_cast<int64_t>(last - first);
  emit(EventKind::segment_unmap, first, static_cast<int64_t>(last - first), piece.stream);
}

}  // namespace oomdiag
