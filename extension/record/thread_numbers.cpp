#include "extension/record/thread_numbers.h"

namespace oomdiag {

uint16_t ThreadNumbers::take(uint64_t id) {
  const std::lock_guard lock(mutex_);
  auto number = static_cast<uint16_t>(id % kUnnumbered);
  for (uint32_t tried = 0; taken_[number] && tried < kUnnumbered; ++tried) {
    number = static_cast<uint16_t>((number + 1) % kUnnumbered);
  }
  taken_[number] = true;
  return number;
}

void ThreadNumbers::release(uint16_t number) {
  const std::lock_guard lock(mutex_);
  taken_[number] = false;
}

}  // namespace oomdiag
