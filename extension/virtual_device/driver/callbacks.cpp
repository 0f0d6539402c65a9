#include "extension/virtual_device/driver/callbacks.h"

#include <atomic>
#include <utility>

#include "extension/virtual_device/driver/device.h"

namespace {

std::atomic<OomdiagCallback> observer = nullptr;
thread_local bool inside = false;

void notify_failed_allocation(int64_t bytes) {
  const OomdiagCallback callback = observer.load(std::memory_order_acquire);
  if (!callback) return;
  CUdeviceptr none = 0;
  const cuMemAlloc_v2_params params{.dptr = &none, .bytesize = static_cast<size_t>(bytes)};
  const CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  for (const CUresult* end : {static_cast<const CUresult*>(nullptr), &result}) {
    callback(CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2, "cuMemAlloc_v2", &params, end);
  }
}

}  // namespace

void oomdiag_device_set_callback(OomdiagCallback callback) { observer.store(callback, std::memory_order_release); }

namespace oomdiag {

bool is_observed() noexcept { return !inside && observer.load(std::memory_order_acquire) != nullptr; }

void notify_resource(CUpti_CallbackIdResource what, const void* context) {
  const OomdiagCallback callback = observer.load(std::memory_order_acquire);
  if (callback) callback(CUPTI_CB_DOMAIN_RESOURCE, static_cast<CUpti_CallbackId>(what), "", context, nullptr);
}

void notify_oom(int64_t bytes) {
  const bool was_inside = std::exchange(inside, true);
  notify_failed_allocation(bytes);
  inside = was_inside;
  oomdiag_device_note_oom(bytes);
}

ObservedCall::ObservedCall(CUpti_CallbackId id, const char* name, const void* params)
    : id_(id), name_(name), params_(params) {
  inside = true;
  if (const OomdiagCallback callback = observer) callback(CUPTI_CB_DOMAIN_DRIVER_API, id_, name_, params_, nullptr);
}

ObservedCall::~ObservedCall() { inside = false; }

CUresult ObservedCall::end(CUresult result) {
  if (const OomdiagCallback callback = observer) callback(CUPTI_CB_DOMAIN_DRIVER_API, id_, name_, params_, &result);
  return result;
}

}  // namespace oomdiag
