#include "extension/virtual_device/driver/contents.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "extension/virtual_device/driver/locks.h"

namespace oomdiag {

Pattern::Pattern(const void* number, size_t bytes) : bytes_(bytes) {
  std::memcpy(number_.data(), number, bytes);
  while (bytes_ > 1 && std::memcmp(number_.data(), number_.data() + bytes_ / 2, bytes_ / 2) == 0) bytes_ /= 2;
}

void Pattern::repeat(void* to, size_t from, size_t bytes) const {
  char* target = static_cast<char*>(to);
  if (bytes_ == 1) {
    std::memset(target, number_[0], bytes);
    return;
  }
  for (size_t i = 0; i < bytes; ++i) target[i] = number_[(from + i) % bytes_];
}

Contents::Piece Contents::cut(const Piece& piece, size_t from, size_t bytes) {
  Piece part{.bytes = bytes,
             .pattern = piece.pattern,
             .phase = (piece.phase + from) % piece.pattern.bytes(),
             .is_dropped = piece.is_dropped,
             .is_guess = piece.is_guess,
             .promise = piece.promise,
             .offset = piece.offset + from};
  if (piece.data.empty()) return part;
  const auto begin = piece.data.begin() + static_cast<std::ptrdiff_t>(from);
  part.data.assign(begin, begin + static_cast<std::ptrdiff_t>(bytes));
  return part;
}

/// The first piece that ends after `at`.
Contents::Pieces::iterator Contents::first_overlap(uintptr_t at) {
  auto entry = pieces_.upper_bound(at);
  if (entry != pieces_.begin() && std::prev(entry)->first + std::prev(entry)->second.bytes > at) --entry;
  return entry;
}

/// Calls use(piece, place in the piece, place in the range, bytes) for what the range has of each piece.
template <typename Use>
void Contents::for_overlaps(uintptr_t from, size_t bytes, Use use) {
  for (auto entry = first_overlap(from); entry != pieces_.end() && entry->first < from + bytes; ++entry) {
    const uintptr_t begin = std::max(entry->first, from);
    const uintptr_t end = std::min(entry->first + entry->second.bytes, from + bytes);
    use(entry->second, begin - entry->first, begin - from, end - begin);
  }
}

void Contents::erase(uintptr_t at, size_t bytes) {
  const uintptr_t end = at + bytes;
  for (auto entry = first_overlap(at); entry != pieces_.end() && entry->first < end;) {
    const uintptr_t begin = entry->first;
    const Piece piece = std::move(entry->second);
    entry = pieces_.erase(entry);
    kept_bytes_ -= piece.data.size();
    if (begin < at) add(begin, cut(piece, 0, at - begin));
    if (begin + piece.bytes > end) add(end, cut(piece, end - begin, begin + piece.bytes - end));
  }
}

void Contents::add(uintptr_t at, Piece piece) {
  kept_bytes_ += piece.data.size();
  pieces_[at] = std::move(piece);
}

void Contents::drop(Piece& piece) {
  kept_bytes_ -= piece.data.size();
  piece = {.bytes = piece.bytes, .is_dropped = true, .is_guess = piece.is_guess};
}

void Contents::keep_within_bounds() {
  if (kept_bytes_ <= kMaxBytes) return;
  for (size_t most = kMaxPieceBytes / 2; most > 0; most /= 2) {
    for (auto& [at, piece] : pieces_) {
      if (kept_bytes_ <= kMaxBytes / 4 * 3) return;
      if (piece.data.size() > most) drop(piece);
    }
  }
}

void Contents::write(uintptr_t to, const void* from, size_t bytes, Origin origin) {
  std::lock_guard guard(lock_);
  erase(to, bytes);
  Piece piece{.bytes = bytes, .is_dropped = bytes > kMaxPieceBytes, .is_guess = origin == Origin::kernel};
  const char* begin = static_cast<const char*>(from);
  if (!piece.is_dropped) piece.data.assign(begin, begin + bytes);
  add(to, std::move(piece));
  keep_within_bounds();
}

void Contents::fill(uintptr_t to, const Pattern& pattern, size_t bytes, Origin origin) {
  std::lock_guard guard(lock_);
  erase(to, bytes);
  add(to, {.bytes = bytes, .pattern = pattern, .is_guess = origin == Origin::kernel});
}

void Contents::forget(uintptr_t at, size_t bytes) {
  std::lock_guard guard(lock_);
  if (!pieces_.empty()) erase(at, bytes);
}

void Contents::forget_whole(uintptr_t at) {
  std::lock_guard guard(lock_);
  const auto entry = first_overlap(at);
  if (entry == pieces_.end() || entry->first > at) return;
  kept_bytes_ -= entry->second.data.size();
  pieces_.erase(entry);
}

void Contents::copy(uintptr_t to, uintptr_t from, size_t bytes) {
  std::lock_guard guard(lock_);
  std::vector<std::pair<size_t, Piece>> found;  // taken first: the two ranges may overlap
  for_overlaps(from, bytes, [&](const Piece& piece, size_t in_piece, size_t in_range, size_t count) {
    found.emplace_back(in_range, cut(piece, in_piece, count));
  });
  erase(to, bytes);
  for (auto& [offset, piece] : found) add(to + offset, std::move(piece));
  keep_within_bounds();
}

const char* Promise::wait() {
  std::call_once(once_, [this] {
    data_.resize(bytes_);
    if (!fetch_(context_.get(), data_.data())) data_.clear();
    context_.reset();
  });
  return data_.empty() ? nullptr : data_.data();
}

void Contents::promise(uintptr_t to, std::shared_ptr<Promise> promise) {
  std::lock_guard guard(lock_);
  const size_t bytes = promise->bytes();
  erase(to, bytes);
  add(to, {.bytes = bytes, .promise = std::move(promise)});
}

std::shared_ptr<Promise> Contents::find_promise(uintptr_t from, size_t bytes) {
  for (auto entry = first_overlap(from); entry != pieces_.end() && entry->first < from + bytes; ++entry) {
    if (entry->second.promise) return entry->second.promise;
  }
  return nullptr;
}

/// Puts what was promised in its place, and gives the lock under which nothing there is promised. Waits without it: the
/// sender may be another thread of this process.
std::unique_lock<ContentsLock> Contents::settle(uintptr_t from, size_t bytes) {
  std::unique_lock guard(lock_);
  while (const auto promise = find_promise(from, bytes)) {
    guard.unlock();
    const char* data = promise->wait();
    guard.lock();
    for (auto entry = first_overlap(from); entry != pieces_.end() && entry->first < from + bytes;) {
      const auto next = std::next(entry);
      Piece& piece = entry->second;
      if (piece.promise == promise && data) {
        piece.data.assign(data + piece.offset, data + piece.offset + piece.bytes);
        piece.promise = nullptr;
        kept_bytes_ += piece.bytes;
      } else if (piece.promise == promise) {
        pieces_.erase(entry);
      }
      entry = next;
    }
    keep_within_bounds();
  }
  return guard;
}

Origin Contents::find_origin(uintptr_t from, size_t bytes) {
  size_t known = 0;
  bool is_dropped = false;
  for_overlaps(from, bytes, [&](const Piece& piece, size_t, size_t, size_t count) {
    known += piece.is_guess ? 0 : count;
    is_dropped |= piece.is_dropped;
  });
  if (known < bytes) return Origin::kernel;
  return is_dropped ? Origin::dropped : Origin::host;
}

Origin Contents::origin(uintptr_t from, size_t bytes) {
  const auto guard = settle(from, bytes);
  return find_origin(from, bytes);
}

void Contents::clear_by_writing(void* to, size_t bytes) { std::memset(to, 0, bytes); }

Uniformity Contents::look(uintptr_t from, size_t bytes, void* number, size_t number_bytes) {
  const auto guard = settle(from, bytes);
  std::array<char, 16> first{};
  size_t covered = 0;
  Uniformity result = Uniformity::known;
  for_overlaps(from, bytes, [&](const Piece& piece, size_t in_piece, size_t in_range, size_t count) {
    std::array<char, 16> here{};
    const size_t period = piece.pattern.bytes();
    const bool is_long = period > number_bytes || number_bytes > here.size();
    if (!is_long) piece.pattern.repeat(here.data(), piece.phase + in_piece + period - in_range % period, number_bytes);
    if (covered == 0) first = here;
    if (piece.is_guess && result == Uniformity::known) result = Uniformity::guess;
    if (piece.is_dropped && result != Uniformity::mixed) result = Uniformity::dropped;
    if (!piece.data.empty() || is_long || here != first) result = Uniformity::mixed;
    covered += count;
  });
  std::memcpy(number, first.data(), std::min(number_bytes, first.size()));
  return covered < bytes ? Uniformity::unknown : result;
}

Origin Contents::read(uintptr_t from, void* to, size_t bytes, void (*clear)(void* to, size_t bytes)) {
  const auto guard = settle(from, bytes);
  clear(to, bytes);
  for_overlaps(from, bytes, [&](const Piece& piece, size_t in_piece, size_t in_range, size_t count) {
    char* target = static_cast<char*>(to) + in_range;
    if (piece.data.empty()) {
      piece.pattern.repeat(target, piece.phase + in_piece, count);
    } else {
      std::memcpy(target, piece.data.data() + in_piece, count);
    }
  });
  return find_origin(from, bytes);
}

}  // namespace oomdiag
