#include "extension/virtual_device/driver/address_space.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/free_ranges.h"
#include "extension/virtual_device/driver/small_heap.h"

namespace oomdiag {
namespace {

constexpr int64_t kArenaBytes = int64_t{64} << 30;

auto& free_addresses = *new FreeRanges;  // never destroyed, under memory_lock()

/// A mapping whose beginning is 2 MiB-aligned; 0 where the kernel does not grant it.
uintptr_t map_aligned(int64_t bytes, int protection) {
  const auto page = static_cast<uintptr_t>(kPageBytes);
  const auto length = static_cast<uintptr_t>(bytes);
  void* space = mmap(nullptr, length + page, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<uintptr_t>(space);
  const uintptr_t aligned = (begin + page - 1) / page * page;
  if (aligned > begin) munmap(space, aligned - begin);
  munmap(reinterpret_cast<void*>(aligned + length), begin + page - aligned);
  return aligned;
}

/// A large reservation if the process may have one, else one of the requested size.
bool reserve(int64_t bytes) {
  for (const int64_t size : {std::max(bytes, kArenaBytes), bytes}) {
    if (const uintptr_t begin = map_aligned(size, PROT_NONE)) {
      free_addresses.give(begin, static_cast<uintptr_t>(size));
      return true;
    }
  }
  return false;
}

int64_t read_setting(const char* path) {
  std::ifstream file(path);
  int64_t value = -1;
  file >> value;
  return value;
}

int64_t count_mappings() {
  std::ifstream file("/proc/self/maps");
  return std::count(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>(), '\n');
}

/// The three bounds that Linux has: setrlimit(2), and proc(5): vm.max_map_count, vm.overcommit_memory.
const char* find_bound() {
  rlimit limit{};
  const int64_t most_mappings = read_setting("/proc/sys/vm/max_map_count");
  if (most_mappings > 0 && count_mappings() + 8 >= most_mappings)
    return "device memory: the process has as many mappings as the host allows (vm.max_map_count)";
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return "device memory beyond the address space of the process (ulimit -v)";
  if (read_setting("/proc/sys/vm/overcommit_memory") == 2)
    return "device memory beyond what the host promises its processes (vm.overcommit_memory is 2)";
  return "device memory beyond the address space of the process";
}

}  // namespace

uintptr_t take_addresses(int64_t bytes) {
  const auto length = static_cast<uintptr_t>(bytes);
  if (const auto begin = free_addresses.take_highest(length)) return *begin;
  return reserve(bytes) ? free_addresses.take_highest(length).value_or(0) : 0;
}

void give_addresses(uintptr_t begin, int64_t bytes) { free_addresses.give(begin, static_cast<uintptr_t>(bytes)); }

void* map_host_memory(int64_t bytes) { return reinterpret_cast<void*>(map_aligned(bytes, PROT_READ | PROT_WRITE)); }

void unmap_host_memory(void* begin, int64_t bytes) { munmap(begin, static_cast<size_t>(bytes)); }

void note_no_addresses() { oomdiag_device_note("unsupported", find_bound()); }

}  // namespace oomdiag
