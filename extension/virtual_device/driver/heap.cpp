#include "extension/virtual_device/driver/heap.h"

#include "extension/virtual_device/driver/address_space.h"

namespace oomdiag {

Refusal Heap::allocate(int64_t bytes, uintptr_t* begin) {
  if (!SmallHeap::serves(bytes)) return allocate_pages(round_to_pages(bytes), begin);
  auto place = small_.take(bytes);
  if (!place) {
    uintptr_t page = 0;
    if (const Refusal refusal = allocate_pages(kPageBytes, &page); refusal != Refusal::none) return refusal;
    small_.add_page(page);
    place = small_.take(bytes);
  }
  *begin = *place;
  return Refusal::none;
}

void Heap::free(uintptr_t begin, int64_t bytes) {
  if (small_.bytes_of(begin) == 0) return free_pages(begin, round_to_pages(bytes));
  if (const auto page = small_.give(begin)) free_pages(*page, kPageBytes);
}

Refusal Heap::allocate_pages(int64_t bytes, uintptr_t* begin) {
  if (!pages_.take_pages(bytes)) return Refusal::by_card;
  *begin = take_addresses(bytes);
  if (*begin != 0) return Refusal::none;
  pages_.give_pages(bytes);
  return Refusal::by_host;
}

void Heap::free_pages(uintptr_t begin, int64_t bytes) {
  give_addresses(begin, bytes);
  pages_.give_pages(bytes);
}

}  // namespace oomdiag
