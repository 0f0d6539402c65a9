#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace samples {

/// What tensors take of the host's memory, by phase, from the CPU allocator's own reports. One thread: the loops run their
/// backward on the calling thread where there is no GPU.
class HostMemory : public c10::MemoryReportingInfoBase {
 public:
  /// The phase that begins; it lasts until leave(), then the phase around it goes on.
  void enter(const std::string& phase);
  void leave();

  void reportMemoryUsage(void* address, int64_t bytes, size_t allocated, size_t reserved, c10::Device device) override;
  bool memoryProfilingEnabled() const override { return true; }

  /// Prints what it has seen, as facts: "host_backward_bytes 1048576", and the host's own memory.
  void print_facts() const;

 private:
  void note();

  std::vector<std::string> phases_{"setup"};
  std::map<std::string, int64_t> peaks_;
  int64_t allocated_ = 0;
};

/// The one of this program. It counts once it is the PROFILER_STATE of the thread.
HostMemory& host_memory();

}  // namespace samples
