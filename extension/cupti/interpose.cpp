// Part of the preloaded shim: the functions of CUPTI that take a subscriber's handle, under the library's own version node.
// Once the recorder is loaded it decides about them (slot.h); else they go to CUPTI unchanged. As in preload.cpp the real ones
// are found by the library's name, never by RTLD_NEXT.

#include "extension/cupti/interpose.h"

#include <dlfcn.h>

#include <atomic>

#include "extension/cupti/slot.h"

namespace {

std::atomic<const oomdiag::CuptiGate*> recorders_gate = nullptr;

const oomdiag::CuptiGate* gate() { return recorders_gate.load(std::memory_order_acquire); }

template <typename Function>
Function* real(Function* own, const char* name) {
  void* library = dlopen("libcupti.so.13", RTLD_NOW | RTLD_NOLOAD);
  auto* found = library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
  return found == own ? nullptr : found;
}

/// `call(pass)` for a real function `pass`; without one, what CUPTI answers where there is no driver.
template <typename Function, typename... Arguments>
CUptiResult pass_on(Function* own, const char* name, Arguments... arguments) {
  Function* const function = real(own, name);
  return function == nullptr ? CUPTI_ERROR_UNKNOWN : function(arguments...);
}

}  // namespace

void oomdiag::route_cupti(const CuptiGate* to) noexcept { recorders_gate.store(to, std::memory_order_release); }

#define OOMDIAG_INTERPOSED extern "C" __attribute__((visibility("default"))) CUptiResult

OOMDIAG_INTERPOSED cuptiSubscribe(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc callback, void* user_data) {
  if (const auto* ours = gate()) return ours->subscribe(handle, callback, user_data, nullptr);
  return pass_on(cuptiSubscribe, "cuptiSubscribe", handle, callback, user_data);
}

OOMDIAG_INTERPOSED cuptiSubscribe_v2(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc callback, void* user_data,
                                     CUpti_SubscriberParams* params) {
  if (const auto* ours = gate()) return ours->subscribe(handle, callback, user_data, params);
  return pass_on(cuptiSubscribe_v2, "cuptiSubscribe_v2", handle, callback, user_data, params);
}

OOMDIAG_INTERPOSED cuptiUnsubscribe(CUpti_SubscriberHandle handle) {
  if (const auto* ours = gate()) return ours->unsubscribe(handle);
  return pass_on(cuptiUnsubscribe, "cuptiUnsubscribe", handle);
}

OOMDIAG_INTERPOSED cuptiEnableCallback(uint32_t enable, CUpti_SubscriberHandle handle, CUpti_CallbackDomain domain,
                                       CUpti_CallbackId id) {
  if (const auto* ours = gate()) return ours->enable_callback(enable, handle, domain, id);
  return pass_on(cuptiEnableCallback, "cuptiEnableCallback", enable, handle, domain, id);
}

OOMDIAG_INTERPOSED cuptiEnableDomain(uint32_t enable, CUpti_SubscriberHandle handle, CUpti_CallbackDomain domain) {
  if (const auto* ours = gate()) return ours->enable_domain(enable, handle, domain);
  return pass_on(cuptiEnableDomain, "cuptiEnableDomain", enable, handle, domain);
}

OOMDIAG_INTERPOSED cuptiFinalize() {
  if (const auto* ours = gate()) return ours->finalize();
  return pass_on(cuptiFinalize, "cuptiFinalize");
}
