// Kernels that are no operator's of PyTorch: Triton's, CuPy's, an extension's. What they write is not known, so that
// what they are given may have been written. A launch has an array of pointers to arguments, and neither their number
// nor their sizes are known: it is read as far as this process can read, which the kernel says without a fault
// (process_vm_readv(2)). A word behind the last argument that happens to be an address of the GPU costs a little
// knowledge and nothing else.

#include "extension/virtual_device/driver/arguments.h"

#include <cstdint>

#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/host_memory.h"
#include "extension/virtual_device/driver/memory.h"

namespace {

constexpr size_t kMaxArguments = 32;

thread_local int known_kernels = 0;

bool read_word(const void* from, uintptr_t* word) { return oomdiag::read_safely(word, from, sizeof *word); }

void forget_now_or_at_replay(const void* at) {
  if (oomdiag::is_any_capturing()) return oomdiag::capture_action([at] { oomdiag_device_forget_whole(at); });
  oomdiag_device_forget_whole(at);
}

}  // namespace

namespace oomdiag {

void forget_arguments(void* const* arguments) noexcept try {
  if (known_kernels > 0 || !arguments || !oomdiag_device_keeps_contents()) return;
  for (size_t i = 0; i < kMaxArguments; ++i) {
    uintptr_t place = 0;
    uintptr_t word = 0;
    if (!read_word(arguments + i, &place) || !read_word(reinterpret_cast<void*>(place), &word)) return;
    const void* at = reinterpret_cast<void*>(word);
    const auto range = find_range(at);
    if (range && range->kind != MemoryKind::host) forget_now_or_at_replay(at);
  }
} catch (...) {
}

}  // namespace oomdiag

int oomdiag_device_set_known_kernels(int depth) {
  const int before = known_kernels;
  known_kernels = depth;
  return before;
}

bool oomdiag_device_is_capturing() { return oomdiag::is_any_capturing(); }

void oomdiag_device_overwritten_at_replay(void* begin, size_t bytes) {
  oomdiag::capture_action([begin, bytes] { oomdiag_device_forget(begin, bytes); });
}
