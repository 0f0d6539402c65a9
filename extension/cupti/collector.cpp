#include "extension/cupti/collector.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>

#include "extension/cupti/calling_libraries.h"
#include "extension/cupti/context_accounting.h"
#include "extension/cupti/driver_allocations.h"
#include "extension/cupti/driver_call.h"
#include "extension/cupti/event_sink.h"
#include "extension/cupti/slot.h"
#include "profiler/event.h"
#include "profiler/trace/format.h"
#include "profiler/trace/writer.h"

// Callbacks come on the thread that calls the driver, inside its call; where that thread is PyTorch's allocator, under the
// allocator's lock. So nothing here calls CUDA back (but for the thread's current device, which is a plain read) and after a
// shared object's first request nothing takes the loader's lock. Events that come before the trace is there are kept.

namespace oomdiag {
namespace {

constexpr int64_t kVirtualPageBytes = int64_t{2} << 20;

using GetDevice = int (*)(int*);
using GetDeviceOf = int (*)(int*, CUcontext);

class Collector {
 public:
  explicit Collector(const CollectorOptions& options)
      : options_(options),
        allocations_(options.virtual_device ? kVirtualPageBytes : 1),
        accounting_(allocations_, sink_, options.virtual_device) {}

  /// Once CUPTI has initialised the driver.
  void find_driver() {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (driver == nullptr) return;
    get_device_ = reinterpret_cast<GetDevice>(dlsym(driver, "cuCtxGetDevice"));
    get_device_of_ = reinterpret_cast<GetDeviceOf>(dlsym(driver, "cuCtxGetDevice_v2"));  // since CUDA 13
    look_at_gpus(driver);
  }

  void on_driver_call(CUpti_CallbackId id, const CUpti_CallbackData& data) {
    const int device = device_of_new_context(id, data.functionParams);
    if (device < 0) return on_memory_call(id, data);
    const std::lock_guard guard(lock_);
    if (data.callbackSite == CUPTI_API_ENTER) return accounting_.before_context(in_range(device));
    const CUresult result = *static_cast<const CUresult*>(data.functionReturnValue);
    if (result == CUDA_SUCCESS) accounting_.after_context(in_range(device), true);
  }

  void on_resource(CUpti_CallbackId id, const CUpti_ResourceData& data) {
    const bool is_module = id == CUPTI_CBID_RESOURCE_MODULE_LOADED;
    const uint16_t library = is_module ? sink_.libraries().find() : uint16_t{0};
    const std::lock_guard guard(lock_);
    if (is_module) return accounting_.after_module(device_of(data.context), library);
    if (id == CUPTI_CBID_RESOURCE_CONTEXT_CREATED) return accounting_.after_context(device_of(data.context), false);
    allocations_.drop_all_of(reinterpret_cast<uintptr_t>(data.context),
                             [&](const DriverEntry& entry) { write(EventKind::driver_free, entry, 0, 0); });
  }

  void attach(TraceWriter& writer, MakeEvent make_event) {
    const std::lock_guard guard(lock_);
    sink_.attach(writer, make_event);
    for (uint8_t d = 0; d < writer.header().device_count; ++d) accounting_.attach(d);
  }

  void describe(uint8_t device) {
    const std::lock_guard guard(lock_);
    if (sink_.writer() == nullptr || device >= kMaxDevices) return;
    accounting_.write_processes(device);
    TraceHeader& header = sink_.writer()->header();
    header.dropped_driver.store(sink_.lost(), std::memory_order_relaxed);
    if (header.chunk_count.load() <= header.chunk_capacity) return;  // the trace still has every event
    allocations_.for_each([&](const DriverEntry& entry) {
      if (entry.device == device) write(EventKind::driver_alloc, entry, kDriverAnnounced, 0);
    });
  }

 private:
  // --- memory ---

  void on_memory_call(CUpti_CallbackId id, const CUpti_CallbackData& data) {
    DriverCall call = read_call(id, data);
    if (call.action == DriverAction::none) return;
    const bool allocates = call.action == DriverAction::allocate;
    const uint32_t stack = allocates && options_.with_stacks ? intern_stack() : 0;
    const DriverCaller caller{.context = reinterpret_cast<uintptr_t>(data.context),
                              .owner = allocates ? sink_.libraries().find() : uint16_t{0},
                              .device = allocates ? current_device() : uint8_t{0}};
    const std::lock_guard guard(lock_);
    if (call.out_of_memory) return write_out_of_memory(call, caller);
    while (true) {
      const AllocationChange change = allocations_.record(call, caller);
      write(change, stack);
      if (change.unmapped <= 0 || change.unmapped >= call.bytes) return;
      call.mapped += static_cast<uint64_t>(change.unmapped);  // the next mapping in the range
      call.bytes -= change.unmapped;
    }
  }

  void write(const AllocationChange& change, uint32_t stack) {
    switch (change.kind) {
      case AllocationChange::Kind::none:
        return;
      case AllocationChange::Kind::allocated:
        return write(EventKind::driver_alloc, change.entry, 0, stack);
      case AllocationChange::Kind::freed:
        return write(EventKind::driver_free, change.entry, 0, 0);
      case AllocationChange::Kind::mapped:
        return write_mapping(change);
    }
  }

  // Handles are numbers of their own: the highest bit keeps them apart from addresses.
  static uint64_t key_of(const DriverEntry& entry) {
    return entry.memory == DriverMemory::handle ? entry.address | uint64_t{1} << 63 : entry.address;
  }

  void write(EventKind kind, const DriverEntry& entry, unsigned flags, uint32_t stack) {
    Event event = sink_.make(kind);
    event.address = key_of(entry);
    event.bytes = entry.bytes;
    event.device = entry.device;
    event.flags = static_cast<uint16_t>(static_cast<unsigned>(entry.memory) | flags);
    if (stack != 0) event.context = stack;
    sink_.write(event, entry.owner, {});
  }

  // Expandable segments map every page of theirs; only where others map may a segment of PyTorch's lie in their pages.
  void write_mapping(const AllocationChange& change) {
    if (std::string_view(sink_.libraries().name(change.entry.owner)) == "libc10_cuda.so") return;
    Event event = sink_.make(EventKind::driver_map);
    event.address = change.mapped;
    event.bytes = change.entry.bytes;
    event.device = change.entry.device;
    event.detail = key_of(change.entry);
    sink_.write_plain(event);
  }

  void write_out_of_memory(const DriverCall& call, const DriverCaller& caller) {
    const DriverEntry requested{
        .bytes = call.bytes, .owner = caller.owner, .device = caller.device, .memory = call.memory};
    write(EventKind::driver_alloc, requested, kDriverOutOfMemory, 0);
  }

  uint32_t intern_stack() {
    TraceWriter* writer = sink_.writer();
    if (writer == nullptr) return 0;
    Context context;
    context.source = writer->intern(std::string_view(describe_stack()));
    return writer->intern(context);
  }

  // --- devices ---

  /// Of a call that makes a context, else -1.
  static int device_of_new_context(CUpti_CallbackId id, const void* params) {
    if (id == CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRetain) {
      return static_cast<const cuDevicePrimaryCtxRetain_params*>(params)->dev;
    }
    if (id == CUPTI_DRIVER_TRACE_CBID_cuCtxCreate_v2) return static_cast<const cuCtxCreate_v2_params*>(params)->dev;
    if (id == CUPTI_DRIVER_TRACE_CBID_cuCtxCreate_v4) return static_cast<const cuCtxCreate_v4_params*>(params)->dev;
    return -1;
  }
  uint8_t current_device() const {
    int device = 0;
    return get_device_ == nullptr || get_device_(&device) != 0 ? uint8_t{0} : in_range(device);
  }
  uint8_t device_of(CUcontext context) const {
    int device = 0;
    return get_device_of_ == nullptr || get_device_of_(&device, context) != 0 ? current_device() : in_range(device);
  }
  static uint8_t in_range(int device) {
    return static_cast<uint8_t>(std::clamp(device, 0, static_cast<int>(kMaxDevices) - 1));
  }

  void look_at_gpus(void* driver) {
    const auto state_of = reinterpret_cast<int (*)(int, unsigned*, int*)>(dlsym(driver, "cuDevicePrimaryCtxGetState"));
    for (int d = 0; state_of != nullptr && d < static_cast<int>(kMaxDevices); ++d) {
      unsigned flags = 0;
      int active = 0;
      if (state_of(d, &flags, &active) != 0) return;
      active != 0 ? accounting_.skip_context(in_range(d)) : accounting_.before_context(in_range(d));
    }
  }

  CollectorOptions options_;
  std::mutex lock_;
  EventSink sink_;
  DriverAllocations allocations_;
  ContextAccounting accounting_;
  GetDevice get_device_ = nullptr;
  GetDeviceOf get_device_of_ = nullptr;
};

Collector* collector = nullptr;  // never destroyed: memory is freed until the very end
std::atomic<bool> collecting = false;
auto& resuming = *new std::mutex;  // for `why_not`, and one thread takes the slot at a time
std::string& why_not = *new std::string("not started");

void CUPTIAPI on_callback(void*, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data) {
  if (!collecting.load(std::memory_order_acquire)) return;
  try {  // C calls us: nothing may be thrown
    if (domain == CUPTI_CB_DOMAIN_RESOURCE)
      return collector->on_resource(id, *static_cast<const CUpti_ResourceData*>(data));
    collector->on_driver_call(id, *static_cast<const CUpti_CallbackData*>(data));
  } catch (...) {
  }
}

}  // namespace

void start_collecting(const CollectorOptions& options) noexcept try {
  if (collector != nullptr) return;
  collector = new Collector(options);
  why_not = options.may_hold_slot ? take_slot(on_callback) : "torch.profiler of this version needs CUPTI for itself";
  collector->find_driver();
  collecting.store(why_not.empty(), std::memory_order_release);
  if (why_not.empty()) return;
  std::fprintf(stderr, "oomdiag: warning: %s: the report cannot say which library holds non-PyTorch memory\n",
               why_not.c_str());
} catch (...) {
}

void attach_collector(TraceWriter& writer, MakeEvent make_event) noexcept try {
  if (collector != nullptr) collector->attach(writer, make_event);
} catch (...) {
}

void describe_gpu(uint8_t device) noexcept try {
  if (collector != nullptr) collector->describe(device);
} catch (...) {
}

void resume_collecting() noexcept try {
  if (!lost_slot() || !collecting.load()) return;
  const std::lock_guard guard(resuming);
  if (lost_slot()) why_not = take_slot(on_callback);
} catch (...) {
}

void stop_collecting_in_child() noexcept { collecting.store(false); }

std::string why_not_collecting() {
  const std::lock_guard guard(resuming);
  return why_not;
}

}  // namespace oomdiag
