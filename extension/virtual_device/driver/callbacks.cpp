#include "extension/virtual_device/driver/callbacks.h"

#include <atomic>

namespace {

std::atomic<OomdiagCallback> told = nullptr;
thread_local bool inside = false;

}  // namespace

void oomdiag_device_set_callback(OomdiagCallback callback) { told.store(callback, std::memory_order_release); }

namespace oomdiag {

bool is_observed() noexcept { return !inside && told.load(std::memory_order_acquire) != nullptr; }

void tell_resource(CUpti_CallbackIdResource what, const void* context) {
  const OomdiagCallback callback = told.load(std::memory_order_acquire);
  if (callback) callback(CUPTI_CB_DOMAIN_RESOURCE, static_cast<CUpti_CallbackId>(what), "", context, nullptr);
}

ObservedCall::ObservedCall(CUpti_CallbackId id, const char* name, const void* params)
    : id_(id), name_(name), params_(params) {
  inside = true;
  if (const OomdiagCallback callback = told) callback(CUPTI_CB_DOMAIN_DRIVER_API, id_, name_, params_, nullptr);
}

ObservedCall::~ObservedCall() { inside = false; }

CUresult ObservedCall::end(CUresult result) {
  if (const OomdiagCallback callback = told) callback(CUPTI_CB_DOMAIN_DRIVER_API, id_, name_, params_, &result);
  return result;
}

}  // namespace oomdiag
