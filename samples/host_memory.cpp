#include "samples/host_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "samples/training.h"

namespace samples {

void HostMemory::enter(const std::string& phase) {
  phases_.push_back(phase);
  note();
}

void HostMemory::leave() { phases_.pop_back(); }

void HostMemory::reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device device) {
  if (!device.is_cpu()) return;
  allocated_ += bytes;
  note();
}

void HostMemory::note() {
  int64_t& peak = peaks_[phases_.back()];
  peak = std::max(peak, allocated_);
}

void HostMemory::print_facts() const {
  int64_t most = 0;
  for (const auto& [phase, peak] : peaks_) {
    print_fact("host_" + phase + "_bytes", peak);
    most = std::max(most, peak);
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  print_fact("host_peak_bytes", most);
  print_fact("host_resident_bytes", int64_t{usage.ru_maxrss} << 10);
  print_fact("host_total_bytes", int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE));
}

// Alive to the end: tensors are freed late, and the allocator reports that too.
HostMemory& host_memory() {
  static auto* const memory = new HostMemory;
  return *memory;
}

}  // namespace samples
