#include "extension/virtual_device/driver/heap.h"

#include "extension/virtual_device/driver/address_space.h"
#include "extension/virtual_device/driver/small_heap.h"

namespace oomdiag {

Oom Heap::allocate(int64_t bytes, uintptr_t* begin) {
  if (!SmallHeap::serves(bytes)) return allocate_pages(round_to_pages(bytes), begin);
  auto place = small_.take(bytes);
  if (!place) {
    uintptr_t page = 0;
    if (const Oom oom = allocate_pages(kPageBytes, &page); oom != Oom::none) return oom;
    small_.add_page(page);
    place = small_.take(bytes);
  }
  *begin = *place;
  return Oom::none;
}

void Heap::free(uintptr_t begin, int64_t bytes) {
  if (small_.bytes_of(begin) == 0) return free_pages(begin, round_to_pages(bytes));
  if (const auto page = small_.give(begin)) free_pages(*page, kPageBytes);
}

Oom Heap::allocate_pages(int64_t bytes, uintptr_t* begin) {
  if (!pages_.charge_pages(bytes)) return Oom::of_gpu;
  *begin = take_addresses(bytes);
  if (*begin != 0) return Oom::none;
  pages_.refund_pages(bytes);
  return Oom::of_host;
}

void Heap::free_pages(uintptr_t begin, int64_t bytes) {
  give_addresses(begin, bytes);
  pages_.refund_pages(bytes);
}

}  // namespace oomdiag
