// Copies and sets between any two places, as far as contents are known (contents.h).

#include "extension/virtual_device/driver/copies.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "extension/environment.h"
#include "extension/virtual_device/driver/contents.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/memory.h"
#include "profiler/trace/shared_file.h"

namespace {

// Never destroyed: a copy may come from another library's destructor.
auto& contents = *new oomdiag::Contents;

std::atomic<bool> keeps_contents = *oomdiag::variables::text(oomdiag::variables::kContents) != '0';

constexpr const char* kBulk = "large copies to the GPU and back: their contents are not kept";

uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

/// Of an address that CUDA does not know: the host's.
oomdiag::MemoryKind kind_of(const void* address) {
  const auto range = oomdiag::find_range(address);
  return range ? range->kind : oomdiag::MemoryKind::host;
}

bool is_on_gpu(const void* address) { return kind_of(address) == oomdiag::MemoryKind::device; }

/// Pinned or managed memory of ours, and enough of it that giving its pages back is worth a call.
bool is_own_bulk(const void* to, size_t bytes) {
  constexpr size_t kWorthACall = size_t{1} << 20;
  if (bytes < kWorthACall) return false;
  const auto range = oomdiag::find_range(to);
  return range && range->kind != oomdiag::MemoryKind::device && !range->is_registered;
}

/// Zeros. The whole pages are given back: they read as zeros too, and activations that are offloaded to the host, of which
/// nobody knows the contents, take none of its memory.
void clear_by_giving_back(void* to, size_t bytes) {
  const uint64_t page = oomdiag::host_page_bytes();  // the kernel rounds the length up to whole ones
  const uintptr_t begin = oomdiag::round_up(address_of(to), page), end = (address_of(to) + bytes) / page * page;
  if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED) != 0) {
    return oomdiag::Contents::clear_by_writing(to, bytes);
  }
  oomdiag::Contents::clear_by_writing(to, begin - address_of(to));
  oomdiag::Contents::clear_by_writing(reinterpret_cast<void*>(end), address_of(to) + bytes - end);
}

struct Expectation {
  int64_t number = -1;
  bool is_known = false;
};
thread_local Expectation expected;

/// An operator's own look at what it has the GPU work out (oomdiag_device_expect).
bool answer_expected(void* to, size_t bytes) {
  const bool is_number = bytes == sizeof(bool) || bytes == sizeof(int32_t) || bytes == sizeof(int64_t);
  if (expected.number < 0 || !is_number) return false;
  std::memcpy(to, &expected.number, bytes);  // the low bytes come first on every host of such a GPU
  expected.number = -1;
  if (!expected.is_known) oomdiag_device_note_read();
  return true;
}

/// The host looks at what a GPU holds.
void read(void* to, const void* from, size_t bytes) {
  const auto clear = is_own_bulk(to, bytes) ? clear_by_giving_back : oomdiag::Contents::clear_by_writing;
  switch (contents.read(address_of(from), to, bytes, clear)) {
    case oomdiag::Origin::host:
      return;
    case oomdiag::Origin::dropped:
      return oomdiag_device_note("estimate", kBulk);
    case oomdiag::Origin::kernel:
      if (!answer_expected(to, bytes)) oomdiag_device_note_read();
  }
}

/// Whether so much goes to managed memory that it is not kept, as of a GPU: the host may have less than that memory is large.
bool is_managed_bulk(oomdiag::MemoryKind target, size_t bytes) {
  if (target != oomdiag::MemoryKind::managed || bytes <= oomdiag::kMaxBytes) return false;
  oomdiag_device_note("estimate", kBulk);
  return true;
}

/// Between two places that the host reaches. What a program looks at in managed memory may be a kernel's, but for what was copied
/// or set there.
void copy_in_memory(void* to, const void* from, size_t bytes, oomdiag::MemoryKind source) {
  const bool is_managed = source == oomdiag::MemoryKind::managed;
  if (is_managed && contents.origin(address_of(from), bytes) == oomdiag::Origin::kernel) oomdiag_device_note_read();
  std::memmove(to, from, bytes);
}

}  // namespace

bool oomdiag::can_copy(void* to, const void* from, size_t bytes) {
  return can_copy_to(to, bytes) && can_copy_from(from, bytes);
}

void oomdiag::set_numbers(void* to, unsigned value, size_t number_bytes, size_t count) {
  const size_t bytes = count * number_bytes;
  const Pattern pattern(&value, number_bytes);
  const MemoryKind target = kind_of(to);
  if (value == 0 && is_own_bulk(to, bytes)) {
    clear_by_giving_back(to, bytes);
  } else if (target != MemoryKind::device && !is_managed_bulk(target, bytes)) {
    pattern.repeat(to, 0, bytes);
  }
  if (target != MemoryKind::host && keeps_contents && bytes) contents.fill(address_of(to), pattern, bytes);
}

void oomdiag_device_copy(void* to, const void* from, size_t bytes) {
  if (!bytes) return;
  const oomdiag::MemoryKind target = kind_of(to);
  const oomdiag::MemoryKind source = kind_of(from);
  if (source == oomdiag::MemoryKind::device && target != oomdiag::MemoryKind::device) {
    read(to, from, bytes);
  } else if (source != oomdiag::MemoryKind::device && target != oomdiag::MemoryKind::device) {
    if (!is_managed_bulk(target, bytes)) copy_in_memory(to, from, bytes, source);
  }
  if (!keeps_contents || target == oomdiag::MemoryKind::host) return;
  if (source == oomdiag::MemoryKind::device) {
    contents.copy(address_of(to), address_of(from), bytes);
  } else {
    contents.write(address_of(to), from, bytes);
  }
}

void oomdiag_device_fill_numbers(void* to, size_t bytes, const void* number, size_t number_bytes, bool is_guess) {
  if (!bytes || !keeps_contents || !is_on_gpu(to)) return;
  const auto origin = is_guess ? oomdiag::Origin::kernel : oomdiag::Origin::host;
  contents.fill(address_of(to), oomdiag::Pattern(number, number_bytes), bytes, origin);
}

int oomdiag_device_look(const void* from, size_t bytes, void* number, size_t number_bytes) {
  return static_cast<int>(contents.look(address_of(from), bytes, number, number_bytes));
}

void oomdiag_device_expect(int64_t number, bool is_known) { expected = {.number = number, .is_known = is_known}; }

void oomdiag_device_forget_whole(const void* at) { contents.forget_whole(address_of(at)); }

bool oomdiag_device_knows(const void* from, size_t bytes) {
  return contents.origin(address_of(from), bytes) == oomdiag::Origin::host;
}

bool oomdiag_device_peek(void* to, const void* from, size_t bytes) {
  if (is_on_gpu(from)) return contents.read(address_of(from), to, bytes) == oomdiag::Origin::host;
  std::memcpy(to, from, bytes);
  return true;
}

void oomdiag_device_guess(void* to, const void* from, size_t bytes) {
  if (keeps_contents && is_on_gpu(to)) contents.write(address_of(to), from, bytes, oomdiag::Origin::kernel);
}

void oomdiag_device_promise(void* to, size_t bytes, bool (*fetch)(void* context, void* into),
                            void (*release)(void* context), void* context) {
  auto promise = std::make_shared<oomdiag::Promise>(bytes, fetch, std::shared_ptr<void>(context, release));
  if (bytes && keeps_contents && is_on_gpu(to)) contents.promise(address_of(to), std::move(promise));
}

void oomdiag_device_forget(void* block, size_t bytes) { contents.forget(address_of(block), bytes); }

bool oomdiag_device_keeps_contents() { return keeps_contents; }
void oomdiag_device_keep_no_contents() { keeps_contents = false; }
