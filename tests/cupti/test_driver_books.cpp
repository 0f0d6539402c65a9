#include "extension/cupti/driver_books.h"
#include "tests/catch.h"

using namespace oomdiag;
using Change = BookEntry::Change;

namespace {

constexpr int64_t kPage = 2 << 20;

DriverCall take(uint64_t address, int64_t bytes, DriverMemory memory = DriverMemory::device) {
  return {.action = DriverAction::allocate, .memory = memory, .address = address, .bytes = bytes};
}
DriverCall give(uint64_t address, DriverMemory memory = DriverMemory::device) {
  return {.action = DriverAction::release, .memory = memory, .address = address};
}
DriverCall map(uint64_t handle, uint64_t at, int64_t bytes) {
  return {.action = DriverAction::map, .memory = DriverMemory::handle, .address = handle, .mapped = at, .bytes = bytes};
}
DriverCall unmap(uint64_t at, int64_t bytes) {
  return {.action = DriverAction::unmap, .memory = DriverMemory::handle, .mapped = at, .bytes = bytes};
}

constexpr DriverCaller kCaller{.context = 0xc0, .owner = 3, .device = 1};

}  // namespace

TEST_CASE("a card charges whole pages, but what takes half a page at most shares one", "[cupti]") {
  DriverBooks books(kPage);
  books.book(take(0x1000, 100), kCaller);
  CHECK(books.card_bytes(1) == 100);
  books.book(take(0x200000, kPage / 2 + 1), kCaller);
  CHECK(books.card_bytes(1) == kPage + 100);
}

TEST_CASE("what was allocated is freed with the bytes and the owner it was allocated with", "[cupti]") {
  DriverBooks books(kPage);
  CHECK(books.book(take(0x1000, kPage + 100), kCaller).change == Change::allocated);
  CHECK(books.card_bytes(1) == 2 * kPage);

  const BookEntry freed = books.book(give(0x1000), {});
  CHECK(freed.change == Change::freed);
  CHECK(freed.entry.bytes == kPage + 100);
  CHECK(freed.entry.owner == 3);
  CHECK(freed.entry.device == 1);
  CHECK(books.card_bytes(1) == 0);
}

TEST_CASE("a free of what nobody allocated is no event", "[cupti]") {
  DriverBooks books(1);
  CHECK(books.book(give(0x1000), {}).change == Change::none);
  books.book(take(0x1000, 100), kCaller);
  books.book(give(0x1000), {});
  CHECK(books.book(give(0x1000), {}).change == Change::none);
}

TEST_CASE("pages live as long as their handle or a mapping does", "[cupti]") {
  DriverBooks books(1);
  books.book(take(7, 4 * kPage, DriverMemory::handle), kCaller);
  CHECK(books.book(map(7, 0x100000, 4 * kPage), {}).change == Change::mapped);
  CHECK(books.book(give(7, DriverMemory::handle), {}).change == Change::none);
  CHECK(books.card_bytes(1) == 4 * kPage);
  CHECK(books.book(unmap(0x100000, 4 * kPage), {}).change == Change::freed);
  CHECK(books.card_bytes(1) == 0);
}

TEST_CASE("a handle that was retained once more wants one release more", "[cupti]") {
  DriverBooks books(1);
  books.book(take(7, kPage, DriverMemory::handle), kCaller);
  books.book({.action = DriverAction::retain, .memory = DriverMemory::handle, .address = 7}, {});
  CHECK(books.book(give(7, DriverMemory::handle), {}).change == Change::none);
  CHECK(books.book(give(7, DriverMemory::handle), {}).change == Change::freed);
}

TEST_CASE("one unmapping may end several mappings", "[cupti]") {
  DriverBooks books(1);
  for (uint64_t handle : {1, 2}) {
    books.book(take(handle, kPage, DriverMemory::handle), kCaller);
    books.book(map(handle, 0x100000 + (handle - 1) * kPage, kPage), {});
    books.book(give(handle, DriverMemory::handle), {});
  }
  DriverCall call = unmap(0x100000, 2 * kPage);
  const BookEntry first = books.book(call, {});
  CHECK(first.change == Change::freed);
  CHECK(first.unmapped == kPage);
  CHECK(books.book(unmap(0x100000 + kPage, kPage), {}).change == Change::freed);
  CHECK(books.card_bytes(1) == 0);
}

TEST_CASE("pages of another process that are mapped here are not ours", "[cupti]") {
  DriverBooks books(1);
  CHECK(books.book(map(99, 0x100000, kPage), {}).change == Change::none);
  CHECK(books.book(unmap(0x100000, kPage), {}).change == Change::none);
}

TEST_CASE("a context that is destroyed takes its blocks with it, and no one else's", "[cupti]") {
  DriverBooks books(1);
  books.book(take(0x1000, 10), kCaller);
  books.book(take(0x2000, 20), kCaller);
  books.book(take(0x3000, 30), {.context = 0xc1, .owner = 3, .device = 1});
  books.book(take(7, 40, DriverMemory::handle), kCaller);

  int64_t freed = 0;
  for (BookEntry one = books.drop_one_of(0xc0); one.change == Change::freed; one = books.drop_one_of(0xc0)) {
    freed += one.entry.bytes;
  }
  CHECK(freed == 30);
  CHECK(books.card_bytes(1) == 70);
}

TEST_CASE("host memory is in the books and not on the card; what was refused is in neither", "[cupti]") {
  DriverBooks books(1);
  books.book(take(0x1000, 10, DriverMemory::pinned), kCaller);
  books.book(take(0x2000, 10, DriverMemory::managed), kCaller);
  CHECK(books.card_bytes(1) == 0);
  CHECK(books.book(give(0x1000, DriverMemory::pinned), {}).change == Change::freed);

  DriverCall refused = take(0, 1 << 30);
  refused.refused = true;
  CHECK(books.book(refused, kCaller).change == Change::none);
}
