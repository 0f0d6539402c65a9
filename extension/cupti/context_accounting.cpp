#include "extension/cupti/context_accounting.h"

#include <unistd.h>

#include <algorithm>

#include "extension/cupti/nvml_reader.h"
#include "profiler/event.h"
#include "profiler/trace/format.h"

namespace oomdiag {

constexpr int kMaxModuleSteps = 512;  // of each GPU; what later modules take is unexplained

void ContextAccounting::before_context(uint8_t device) {
  Gpu& gpu = gpus_[device];
  if (gpu.has_context || gpu.before.valid) return;
  gpu.before = nvml_.read(device);
  if (!gpu.before.valid) return;
  remember(device, gpu.before);
  const int64_t at_start = nvml_.used_at_start(device);
  if (at_start >= 0) write_step(device, gpu.used_bytes - at_start, "cuInit");
}

// The process that NVML lists since the context is there is ours: in a container its pid is another one than getpid's.
void ContextAccounting::after_context(uint8_t device, bool is_whole) {
  Gpu& gpu = gpus_[device];
  if (gpu.has_whole_context) return;
  gpu.has_context = true;
  gpu.has_whole_context = is_whole;
  const NvmlReading after = nvml_.read(device);
  if (!after.valid || !gpu.before.valid) return;
  for (const ProcessOnGpu& one : after.listed()) {
    if (!gpu.before.lists(one.pid) && gpu.own_pid == 0) gpu.own_pid = one.pid;
  }
  take_step(device, after, "context");
  write_processes(device, after);
}

void ContextAccounting::after_module(uint8_t device, uint16_t library) {
  Gpu& gpu = gpus_[device];
  if (!gpu.before.valid || gpu.module_steps >= kMaxModuleSteps) return;
  const NvmlReading now = nvml_.read(device);
  if (!now.valid) return;
  ++gpu.module_steps;
  const char* name = sink_.libraries().name(library);
  take_step(device, now, std::string("modules of ") + (*name == '\0' ? "an unknown library" : name));
}

void ContextAccounting::attach(uint8_t device) {
  TraceHeader& header = sink_.writer()->header();
  if (device >= header.device_count || virtual_device_ || gpus_[device].own_bytes == 0) return;
  header.devices[device].context_bytes = gpus_[device].own_bytes;
}

// What the GPU lost since the last reading and neither the recorded allocations nor other processes explain.
void ContextAccounting::take_step(uint8_t device, const NvmlReading& now, const std::string& name) {
  Gpu& gpu = gpus_[device];
  const int64_t used = gpu.used_bytes;
  const int64_t known = gpu.others_bytes + gpu.driver_bytes;
  remember(device, now);
  const int64_t step = (gpu.used_bytes - used) - (gpu.others_bytes + gpu.driver_bytes - known);
  if (step <= 0) return;
  gpu.own_bytes += step;
  write_step(device, step, name);
  if (sink_.writer() != nullptr) attach(device);
}

void ContextAccounting::remember(uint8_t device, const NvmlReading& now) {
  Gpu& gpu = gpus_[device];
  gpu.used_bytes = now.used_bytes;
  gpu.driver_bytes = allocations_.gpu_bytes(device);
  gpu.others_bytes = 0;
  for (const ProcessOnGpu& one : now.listed()) {
    if (one.pid != gpu.own_pid) gpu.others_bytes += one.bytes;
  }
}

void ContextAccounting::write_step(uint8_t device, int64_t bytes, const std::string& name) {
  Event event = sink_.make(EventKind::gpu_step);
  event.device = device;
  event.address = static_cast<uint64_t>(gpus_[device].used_bytes);
  event.bytes = std::max<int64_t>(0, bytes);
  sink_.write(event, 0, name);
}

// Where our own process cannot be identified, none is reported as another one.
void ContextAccounting::write_processes(uint8_t device, const NvmlReading& reading) {
  Gpu& gpu = gpus_[device];
  const auto our_pid = static_cast<uint32_t>(getpid());
  if (gpu.own_pid == 0 && reading.lists(our_pid)) gpu.own_pid = our_pid;
  if (!reading.valid || (gpu.own_pid == 0 && reading.process_count > 0)) return;
  Event first = sink_.make(EventKind::gpu_process);
  first.device = device;
  first.flags = kFirstProcess;
  sink_.write(first, 0, {});
  for (const ProcessOnGpu& one : reading.listed()) {
    if (one.pid == gpu.own_pid) continue;
    char name[64];
    name_process(one.pid, name, sizeof name);
    Event event = sink_.make(EventKind::gpu_process);
    event.device = device;
    event.address = one.pid;
    event.bytes = one.bytes;
    sink_.write(event, 0, name);
  }
}

}  // namespace oomdiag
