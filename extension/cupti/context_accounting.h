#pragma once

#include <array>
#include <string>

#include "extension/cupti/driver_allocations.h"
#include "extension/cupti/event_sink.h"
#include "extension/cupti/nvml_reader.h"
#include "profiler/trace/format.h"

namespace oomdiag {

/// What no call of the driver reports: what a context and its modules take, measured as steps of the used memory, and
/// which other processes hold the GPU. Calls must not overlap.
class ContextAccounting {
 public:
  ContextAccounting(const DriverAllocations& allocations, EventSink& sink, bool virtual_device)
      : allocations_(allocations), sink_(sink), virtual_device_(virtual_device) {
    nvml_.open();
  }

  /// The first reading of a GPU. What it lost since the start, before any context, is cuInit's.
  void before_context(uint8_t device);
  /// Called twice: when CUPTI reports the context, and when the call that made it returns.
  void after_context(uint8_t device, bool is_whole);
  /// A context that was there before us took its bytes unseen.
  void skip_context(uint8_t device) { gpus_[device].has_context = gpus_[device].has_whole_context = true; }
  /// Code was loaded, for the shared object with this number.
  void after_module(uint8_t device, uint16_t library);

  /// Writes who else holds the GPU, as NVML has it now.
  void write_processes(uint8_t device) { write_processes(device, nvml_.read(device)); }
  /// Once there is a trace: what was measured before goes into its header.
  void attach(uint8_t device);

 private:
  struct Gpu {
    bool has_context = false;
    bool has_whole_context = false;  ///< the call that makes it has returned
    NvmlReading before;              ///< before there was a context; not valid if that was before us
    int64_t used_bytes = 0;          ///< at the last reading
    int64_t others_bytes = 0;        ///< of it other processes'
    int64_t driver_bytes = 0;        ///< of it recorded as driver allocations then
    int64_t own_bytes = 0;           ///< context and modules: what was measured so far
    uint32_t own_pid = 0;            ///< ours, as NVML numbers it: it may live outside of our container
    int module_steps = 0;
  };

  void take_step(uint8_t device, const NvmlReading& now, const std::string& name);
  void remember(uint8_t device, const NvmlReading& now);
  void write_step(uint8_t device, int64_t bytes, const std::string& name);
  void write_processes(uint8_t device, const NvmlReading& reading);

  const DriverAllocations& allocations_;
  EventSink& sink_;
  bool virtual_device_;
  NvmlReader nvml_;
  std::array<Gpu, kMaxDevices> gpus_{};
};

}  // namespace oomdiag
