#include "profiler/trace/packed_events.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "profiler/event.h"
#include "profiler/trace/event_file.h"
#include "profiler/trace/event_log.h"

// The history of an allocator says the same things again and again: events lie close in time, a block's free is completed
// as soon as it is asked for, and of an event's fourteen fields five differ from those of the one before. So each window of
// events is a row of bytes, which begin with a head:
//
//   kind (5 bits)  kSame  kDetail  kOther
//
//   kSame    nothing follows: all but the kind is as in the event before
//   kDetail  the detail (a stream) follows, for it is another one
//   kOther   a byte follows: the device; or kRaw and the 64 bytes of the event, which has fields of the rarer kind
//
// then a byte that says how long four numbers are, and these: the time, the address and the context as differences to those
// before, and the size. Differences have the sign in the lowest bit; addresses and sizes are written in units of 512
// bytes where they are such. A window needs none of the others to be read.

namespace oomdiag {
namespace {

constexpr uint8_t kSame = 0x20, kDetail = 0x40, kOther = 0x80, kKind = 0x1f, kRaw = 0xff;
constexpr size_t kMaxBytes = 2 + sizeof(Event);  // of an event

constexpr uint64_t zigzag(uint64_t difference) { return difference << 1 ^ (0 - (difference >> 63)); }
constexpr uint64_t unzigzag(uint64_t number) { return number >> 1 ^ (0 - (number & 1)); }

/// Multiples of 512 are what an allocator hands out. Of other numbers the highest bit would get lost.
constexpr uint64_t in_units(uint64_t number) { return number % 512 == 0 ? number / 512 << 1 : number << 1 | 1; }
constexpr uint64_t from_units(uint64_t number) { return (number & 1) != 0 ? number >> 1 : (number >> 1) * 512; }
constexpr uint64_t way_in_units(uint64_t way) {
  return way % 512 == 0 ? zigzag(static_cast<uint64_t>(static_cast<int64_t>(way) / 512)) << 1 : zigzag(way) << 1 | 1;
}
constexpr uint64_t way_from_units(uint64_t number) { return unzigzag(number >> 1) * ((number & 1) != 0 ? 1 : 512); }
constexpr bool fits(uint64_t number) { return number >> 62 == 0; }

constexpr std::array<uint64_t, 4> kMasks = {0xff, 0xffff, 0xffffffff, ~uint64_t{0}};
constexpr size_t kLongest = 8;  // what is read and written beyond the end

/// Numbers of 1, 2, 4 or 8 bytes.
constexpr unsigned length_code(uint64_t number) {
  return (number > kMasks[0] ? 1u : 0u) + (number > kMasks[1] ? 1u : 0u) + (number > kMasks[2] ? 1u : 0u);
}

unsigned put(uint8_t*& at, uint64_t number) {
  const unsigned code = length_code(number);
  std::memcpy(at, &number, sizeof number);
  at += size_t{1} << code;
  return code;
}

uint64_t take(const uint8_t*& at, unsigned code) {
  uint64_t number = 0;
  std::memcpy(&number, at, sizeof number);
  at += size_t{1} << code;
  return number & kMasks[code];
}

/// Whether the head can hold the kind. Those of snapshots are among the first ones.
constexpr bool is_short(EventKind kind) { return static_cast<uint8_t>(kind) <= kKind; }

bool is_plain(const Event& event) {
  return is_short(event.kind) && event.node_sequence == kNoNode && event.call_id == 0 && event.node_thread == 0 &&
         event.flags == 0 && event.thread == event.device && event.device < kRaw &&
         fits(static_cast<uint64_t>(event.bytes));
}

bool is_same(const Event& a, const Event& b) {
  return a.time == b.time && a.address == b.address && a.bytes == b.bytes && a.detail == b.detail &&
         a.context == b.context && a.device == b.device;
}

}  // namespace

void PackedEvents::read(EventWindow& window) const {
  const uint64_t first = window.number * EventWindow::kEvents;
  if (first >= size_) return;
  const uint8_t* at = windows_[window.number].get();
  Event now;
  const uint64_t count = std::min(EventWindow::kEvents, size_ - first);
  for (uint64_t i = 0; i < count; ++i) {
    const uint8_t head = *at++;
    now.kind = static_cast<EventKind>(head & kKind);
    now.sequence = first + i + 1;
    if ((head & kOther) != 0) {
      const uint8_t device = *at++;
      if (device == kRaw) {
        std::memcpy(&window.events[i], at, sizeof(Event));
        window.events[i].sequence = now.sequence;
        at += sizeof(Event);
        continue;
      }
      now.device = device;
      now.thread = device;
    }
    if ((head & kSame) == 0) {
      if ((head & kDetail) != 0) now.detail = take(at, 3);
      const unsigned lengths = *at++;
      now.time += unzigzag(take(at, lengths & 3));
      now.address += way_from_units(take(at, lengths >> 2 & 3));
      now.context += static_cast<uint32_t>(unzigzag(take(at, lengths >> 4 & 3)));
      now.bytes = static_cast<int64_t>(from_units(take(at, lengths >> 6)));
    }
    window.events[i] = now;
  }
}

EventPacker::EventPacker()
    : packed_(std::make_shared<PackedEvents>()), open_(EventWindow::kEvents * kMaxBytes + kLongest) {}

void EventPacker::add(const Event& event) {
  uint8_t* const begin = open_.data() + used_;
  uint8_t* at = begin + 1;
  *begin = static_cast<uint8_t>(event.kind) & kKind;
  const uint64_t way = event.address - before_.address;
  if (!is_plain(event) || !fits(zigzag(way))) {
    *begin |= kOther;
    *at++ = kRaw;
    std::memcpy(at, &event, sizeof event);
    at += sizeof event;
  } else {
    if (event.device != before_.device) {
      *begin |= kOther;
      *at++ = event.device;
    }
    if (is_same(event, before_)) {
      *begin |= kSame;
    } else {
      if (event.detail != before_.detail) {
        *begin |= kDetail;
        std::memcpy(at, &event.detail, sizeof event.detail);
        at += sizeof event.detail;
      }
      uint8_t* const lengths = at++;
      unsigned codes = put(at, zigzag(event.time - before_.time));
      codes |= put(at, way_in_units(way)) << 2;
      codes |= put(at, zigzag(event.context - static_cast<uint64_t>(before_.context))) << 4;
      codes |= put(at, in_units(static_cast<uint64_t>(event.bytes))) << 6;
      *lengths = static_cast<uint8_t>(codes);
      before_ = event;
    }
  }
  used_ += static_cast<size_t>(at - begin);
  if (++packed_->size_ % EventWindow::kEvents == 0) seal();
}

void EventPacker::seal() {
  auto bytes = std::make_unique<uint8_t[]>(used_ + kLongest);
  std::memcpy(bytes.get(), open_.data(), used_);
  packed_->windows_.push_back(std::move(bytes));
  packed_->bytes_ += used_;
  used_ = 0;
  before_ = {};
}

std::shared_ptr<const PackedEvents> EventPacker::finish() {
  if (used_ > 0) seal();
  open_ = {};
  return std::move(packed_);
}

EventLog log_of(std::shared_ptr<const PackedEvents> packed) {
  const uint64_t size = packed->size();
  return {EventFile(std::move(packed)), {EventRun{}}, size};
}

}  // namespace oomdiag
