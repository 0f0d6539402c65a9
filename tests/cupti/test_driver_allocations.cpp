#include "extension/cupti/driver_allocations.h"
#include "tests/catch.h"

using namespace oomdiag;
using Kind = AllocationChange::Kind;

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

TEST_CASE("a GPU charges whole pages, but what takes half a page at most shares one", "[cupti]") {
  DriverAllocations allocations(kPage);
  allocations.record(take(0x1000, 100), kCaller);
  CHECK(allocations.gpu_bytes(1) == 100);
  allocations.record(take(0x200000, kPage / 2 + 1), kCaller);
  CHECK(allocations.gpu_bytes(1) == kPage + 100);
}

TEST_CASE("what was allocated is freed with the bytes and the owner it was allocated with", "[cupti]") {
  DriverAllocations allocations(kPage);
  CHECK(allocations.record(take(0x1000, kPage + 100), kCaller).kind == Kind::allocated);
  CHECK(allocations.gpu_bytes(1) == 2 * kPage);

  const AllocationChange freed = allocations.record(give(0x1000), {});
  CHECK(freed.kind == Kind::freed);
  CHECK(freed.entry.bytes == kPage + 100);
  CHECK(freed.entry.owner == 3);
  CHECK(freed.entry.device == 1);
  CHECK(allocations.gpu_bytes(1) == 0);
}

TEST_CASE("a free of what nobody allocated is no event", "[cupti]") {
  DriverAllocations allocations(1);
  CHECK(allocations.record(give(0x1000), {}).kind == Kind::none);
  allocations.record(take(0x1000, 100), kCaller);
  allocations.record(give(0x1000), {});
  CHECK(allocations.record(give(0x1000), {}).kind == Kind::none);
}

TEST_CASE("pages live as long as their handle or a mapping does", "[cupti]") {
  DriverAllocations allocations(1);
  allocations.record(take(7, 4 * kPage, DriverMemory::handle), kCaller);
  CHECK(allocations.record(map(7, 0x100000, 4 * kPage), {}).kind == Kind::mapped);
  CHECK(allocations.record(give(7, DriverMemory::handle), {}).kind == Kind::none);
  CHECK(allocations.gpu_bytes(1) == 4 * kPage);
  CHECK(allocations.record(unmap(0x100000, 4 * kPage), {}).kind == Kind::freed);
  CHECK(allocations.gpu_bytes(1) == 0);
}

TEST_CASE("a handle that was retained once more wants one release more", "[cupti]") {
  DriverAllocations allocations(1);
  allocations.record(take(7, kPage, DriverMemory::handle), kCaller);
  allocations.record({.action = DriverAction::retain, .memory = DriverMemory::handle, .address = 7}, {});
  CHECK(allocations.record(give(7, DriverMemory::handle), {}).kind == Kind::none);
  CHECK(allocations.record(give(7, DriverMemory::handle), {}).kind == Kind::freed);
}

TEST_CASE("one unmapping may end several mappings", "[cupti]") {
  DriverAllocations allocations(1);
  for (uint64_t handle : {1, 2}) {
    allocations.record(take(handle, kPage, DriverMemory::handle), kCaller);
    allocations.record(map(handle, 0x100000 + (handle - 1) * kPage, kPage), {});
    allocations.record(give(handle, DriverMemory::handle), {});
  }
  DriverCall call = unmap(0x100000, 2 * kPage);
  const AllocationChange first = allocations.record(call, {});
  CHECK(first.kind == Kind::freed);
  CHECK(first.unmapped == kPage);
  CHECK(allocations.record(unmap(0x100000 + kPage, kPage), {}).kind == Kind::freed);
  CHECK(allocations.gpu_bytes(1) == 0);
}

TEST_CASE("pages of another process that are mapped here are not ours", "[cupti]") {
  DriverAllocations allocations(1);
  CHECK(allocations.record(map(99, 0x100000, kPage), {}).kind == Kind::none);
  CHECK(allocations.record(unmap(0x100000, kPage), {}).kind == Kind::none);
}

TEST_CASE("a context that is destroyed takes its blocks with it, and no one else's", "[cupti]") {
  DriverAllocations allocations(1);
  allocations.record(take(0x1000, 10), kCaller);
  allocations.record(take(0x2000, 20), kCaller);
  allocations.record(take(0x3000, 30), {.context = 0xc1, .owner = 3, .device = 1});
  allocations.record(take(7, 40, DriverMemory::handle), kCaller);

  int64_t freed = 0;
  allocations.drop_all_of(0xc0, [&](const DriverEntry& entry) { freed += entry.bytes; });
  CHECK(freed == 30);
  CHECK(allocations.gpu_bytes(1) == 70);
}

TEST_CASE("host memory is recorded and not on the GPU; a failed allocation is neither", "[cupti]") {
  DriverAllocations allocations(1);
  allocations.record(take(0x1000, 10, DriverMemory::pinned), kCaller);
  allocations.record(take(0x2000, 10, DriverMemory::managed), kCaller);
  CHECK(allocations.gpu_bytes(1) == 0);
  CHECK(allocations.record(give(0x1000, DriverMemory::pinned), {}).kind == Kind::freed);

  DriverCall failed = take(0, 1 << 30);
  failed.out_of_memory = true;
  CHECK(allocations.record(failed, kCaller).kind == Kind::none);
}
