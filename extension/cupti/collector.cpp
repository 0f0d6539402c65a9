#include "extension/cupti/collector.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>

#include "extension/cupti/card_watch.h"
#include "extension/cupti/driver_books.h"
#include "extension/cupti/outlet.h"
#include "extension/cupti/slot.h"

// Callbacks come on the thread that calls the driver, inside its call; where that thread is PyTorch's allocator, under the
// allocator's lock. So nothing here calls CUDA back (but for the thread's current device, which is a plain read) and after a
// shared object's first request nothing allocates. Events that come before the trace is there are kept.

namespace oomdiag {
namespace {

constexpr int64_t kVirtualPageBytes = int64_t{2} << 20;

using GetDevice = int (*)(int*);
using GetDeviceOf = int (*)(int*, CUcontext);

class Collector {
 public:
  explicit Collector(const CollectorOptions& options)
      : options_(options),
        books_(options.virtual_device ? kVirtualPageBytes : 1),
        watch_(books_, outlet_, options.virtual_device) {}

  /// Once CUPTI has initialised the driver.
  void find_driver() {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (driver == nullptr) return;
    get_device_ = reinterpret_cast<GetDevice>(dlsym(driver, "cuCtxGetDevice"));
    get_device_of_ = reinterpret_cast<GetDeviceOf>(dlsym(driver, "cuCtxGetDevice_v2"));  // since CUDA 13
    look_at_cards(driver);
  }

  void on_driver_call(CUpti_CallbackId id, const CUpti_CallbackData& data) {
    const int device = device_of_new_context(id, data.functionParams);
    if (device < 0) return on_memory_call(id, data);
    const std::lock_guard guard(lock_);
    if (data.callbackSite == CUPTI_API_ENTER) return watch_.before_context(in_range(device));
    const CUresult result = *static_cast<const CUresult*>(data.functionReturnValue);
    if (result == CUDA_SUCCESS) watch_.after_context(in_range(device), true);
  }

  void on_resource(CUpti_CallbackId id, const CUpti_ResourceData& data) {
    const bool is_module = id == CUPTI_CBID_RESOURCE_MODULE_LOADED;
    const uint16_t asker = is_module ? outlet_.askers().find() : uint16_t{0};
    const std::lock_guard guard(lock_);
    if (is_module) return watch_.after_module(device_of(data.context), asker);
    if (id == CUPTI_CBID_RESOURCE_CONTEXT_CREATED) return watch_.after_context(device_of(data.context), false);
    while (true) {  // a context that is destroyed takes its memory with it
      const BookEntry booked = books_.drop_one_of(reinterpret_cast<uintptr_t>(data.context));
      if (booked.change == BookEntry::Change::none) return;
      write(booked, 0);
    }
  }

  void attach(TraceWriter& writer, MakeEvent make_event) {
    const std::lock_guard guard(lock_);
    outlet_.attach(writer, make_event);
    for (uint8_t d = 0; d < writer.header().device_count; ++d) watch_.attach(d);
  }

  void describe(uint8_t device) {
    const std::lock_guard guard(lock_);
    if (outlet_.writer() == nullptr || device >= kMaxDevices) return;
    watch_.write_processes(device);
    TraceHeader& header = outlet_.writer()->header();
    header.dropped_driver.store(books_.lost() + outlet_.lost(), std::memory_order_relaxed);
    if (header.chunk_count.load() <= header.chunk_capacity) return;  // the trace still has every event
    books_.for_each([&](const DriverEntry& entry) {
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
                              .owner = allocates ? outlet_.askers().find() : uint16_t{0},
                              .device = allocates ? current_device() : uint8_t{0}};
    const std::lock_guard guard(lock_);
    if (call.refused) return write_refusal(call, caller);
    while (true) {
      const BookEntry booked = books_.book(call, caller);
      write(booked, stack);
      if (booked.unmapped <= 0 || booked.unmapped >= call.bytes) return;
      call.mapped += static_cast<uint64_t>(booked.unmapped);  // the next mapping in the range
      call.bytes -= booked.unmapped;
    }
  }

  void write(const BookEntry& booked, uint32_t stack) {
    switch (booked.change) {
      case BookEntry::Change::none:
        return;
      case BookEntry::Change::allocated:
        return write(EventKind::driver_alloc, booked.entry, 0, stack);
      case BookEntry::Change::freed:
        return write(EventKind::driver_free, booked.entry, 0, 0);
      case BookEntry::Change::mapped:
        return write_mapping(booked);
    }
  }

  // Handles are numbers of their own: the highest bit keeps them apart from addresses.
  static uint64_t key_of(const DriverEntry& entry) {
    return entry.memory == DriverMemory::handle ? entry.address | uint64_t{1} << 63 : entry.address;
  }

  void write(EventKind kind, const DriverEntry& entry, unsigned flags, uint32_t stack) {
    Event event = outlet_.make(kind);
    event.address = key_of(entry);
    event.bytes = entry.bytes;
    event.device = entry.device;
    event.flags = static_cast<uint16_t>(static_cast<unsigned>(entry.memory) | flags);
    if (stack != 0) event.context = stack;
    outlet_.write(event, entry.owner, {});
  }

  // Expandable segments map every page of theirs; only where others map may a segment of PyTorch's lie in their pages.
  void write_mapping(const BookEntry& booked) {
    if (std::string_view(outlet_.askers().name(booked.entry.owner)) == "libc10_cuda.so") return;
    Event event = outlet_.make(EventKind::driver_map);
    event.address = booked.mapped;
    event.bytes = booked.entry.bytes;
    event.device = booked.entry.device;
    event.detail = key_of(booked.entry);
    outlet_.write_plain(event);
  }

  void write_refusal(const DriverCall& call, const DriverCaller& caller) {
    const DriverEntry wanted{
        .bytes = call.bytes, .owner = caller.owner, .device = caller.device, .memory = call.memory};
    write(EventKind::driver_alloc, wanted, kDriverRefused, 0);
  }

  uint32_t intern_stack() {
    TraceWriter* writer = outlet_.writer();
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

  void look_at_cards(void* driver) {
    const auto state_of = reinterpret_cast<int (*)(int, unsigned*, int*)>(dlsym(driver, "cuDevicePrimaryCtxGetState"));
    for (int d = 0; state_of != nullptr && d < static_cast<int>(kMaxDevices); ++d) {
      unsigned flags = 0;
      int active = 0;
      if (state_of(d, &flags, &active) != 0) return;
      active != 0 ? watch_.skip_context(in_range(d)) : watch_.before_context(in_range(d));
    }
  }

  CollectorOptions options_;
  std::mutex lock_;
  Outlet outlet_;
  DriverBooks books_;
  CardWatch watch_;
  GetDevice get_device_ = nullptr;
  GetDeviceOf get_device_of_ = nullptr;
};

Collector* collector = nullptr;  // never destroyed: memory is freed until the very end
std::atomic<bool> collecting = false;
std::string& refusal = *new std::string("not started");

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
  refusal = options.may_hold_slot ? take_slot(on_callback) : "torch.profiler of this version needs CUPTI for itself";
  collector->find_driver();
  collecting.store(refusal.empty(), std::memory_order_release);
  if (refusal.empty()) return;
  std::fprintf(stderr, "oomdiag: warning: %s: the report cannot tell which library holds memory outside of PyTorch\n",
               refusal.c_str());
} catch (...) {
}

void attach_collector(TraceWriter& writer, MakeEvent make_event) noexcept try {
  if (collector != nullptr) collector->attach(writer, make_event);
} catch (...) {
}

void describe_card(uint8_t device) noexcept try {
  if (collector != nullptr) collector->describe(device);
} catch (...) {
}

void resume_collecting() noexcept try {
  if (!lost_slot() || !collecting.load()) return;
  refusal = take_slot(on_callback);
} catch (...) {
}

void stop_collecting_in_child() noexcept { collecting.store(false); }

std::string why_not_collecting() { return refusal; }

}  // namespace oomdiag
