// Part of the preloaded shim: the functions of CUPTI that take a subscriber's handle, under the library's own version nodes.
// Once the recorder is loaded it decides about them (slot.h); else they go to CUPTI unchanged. As in preload.cpp the real ones
// are found by the library's name, never by RTLD_NEXT.

#include "extension/cupti/interpose.h"

#include <dlfcn.h>

#include <atomic>

#include "extension/cuda_major.h"
#include "extension/cupti/slot.h"

namespace {

std::atomic<const oomdiag::CuptiGate*> recorders_gate = nullptr;

const oomdiag::CuptiGate* gate() { return recorders_gate.load(std::memory_order_acquire); }

/// `call(pass)` for the real function `pass`; without one, what CUPTI answers where there is no driver.
template <typename Major, typename Function, typename... Arguments>
CUptiResult pass_on(Function* own, const char* name, Arguments... arguments) {
  void* library = dlopen(Major::kCupti, RTLD_NOW | RTLD_NOLOAD);
  auto* found = library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
  return found == nullptr || found == own ? CUPTI_ERROR_UNKNOWN : found(arguments...);
}

}  // namespace

void oomdiag::route_cupti(const CuptiGate* to) noexcept { recorders_gate.store(to, std::memory_order_release); }

#define OOMDIAG_INTERPOSED extern "C" __attribute__((visibility("default"))) CUptiResult

OOMDIAG_INTERPOSED cuptiSubscribe_v2(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc callback, void* user_data,
                                     CUpti_SubscriberParams* params) {
  if (const auto* ours = gate()) return ours->subscribe(handle, callback, user_data, params);
  return pass_on<oomdiag::Cuda13>(cuptiSubscribe_v2, "cuptiSubscribe_v2", handle, callback, user_data, params);
}

// The functions that both majors have: cuptiX for CUDA 13, oomdiag_cuptiX for CUDA 12.
#define OOMDIAG_FOR(Major, prefix)                                                                                  \
  OOMDIAG_INTERPOSED prefix##Subscribe(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc callback, void* data) {   \
    if (const auto* ours = gate()) return ours->subscribe(handle, callback, data, nullptr);                         \
    return pass_on<oomdiag::Major>(prefix##Subscribe, "cuptiSubscribe", handle, callback, data);                    \
  }                                                                                                                 \
  OOMDIAG_INTERPOSED prefix##Unsubscribe(CUpti_SubscriberHandle handle) {                                           \
    if (const auto* ours = gate()) return ours->unsubscribe(handle);                                                \
    return pass_on<oomdiag::Major>(prefix##Unsubscribe, "cuptiUnsubscribe", handle);                                \
  }                                                                                                                 \
  OOMDIAG_INTERPOSED prefix##EnableCallback(uint32_t enable, CUpti_SubscriberHandle handle,                         \
                                            CUpti_CallbackDomain domain, CUpti_CallbackId id) {                     \
    if (const auto* ours = gate()) return ours->enable_callback(enable, handle, domain, id);                        \
    return pass_on<oomdiag::Major>(prefix##EnableCallback, "cuptiEnableCallback", enable, handle, domain, id);      \
  }                                                                                                                 \
  OOMDIAG_INTERPOSED prefix##EnableDomain(uint32_t enable, CUpti_SubscriberHandle handle,                           \
                                          CUpti_CallbackDomain domain) {                                            \
    if (const auto* ours = gate()) return ours->enable_domain(enable, handle, domain);                              \
    return pass_on<oomdiag::Major>(prefix##EnableDomain, "cuptiEnableDomain", enable, handle, domain);              \
  }                                                                                                                 \
  OOMDIAG_INTERPOSED prefix##EnableAllDomains(uint32_t enable, CUpti_SubscriberHandle handle) {                     \
    if (const auto* ours = gate()) return ours->enable_all_domains(enable, handle);                                 \
    return pass_on<oomdiag::Major>(prefix##EnableAllDomains, "cuptiEnableAllDomains", enable, handle);              \
  }                                                                                                                 \
  OOMDIAG_INTERPOSED prefix##GetCallbackState(uint32_t* enabled, CUpti_SubscriberHandle handle,                     \
                                              CUpti_CallbackDomain domain, CUpti_CallbackId id) {                   \
    if (const auto* ours = gate()) return ours->callback_state(enabled, handle, domain, id);                        \
    return pass_on<oomdiag::Major>(prefix##GetCallbackState, "cuptiGetCallbackState", enabled, handle, domain, id); \
  }                                                                                                                 \
  OOMDIAG_INTERPOSED prefix##Finalize() {                                                                           \
    if (const auto* ours = gate()) return ours->finalize();                                                         \
    return pass_on<oomdiag::Major>(prefix##Finalize, "cuptiFinalize");                                              \
  }

OOMDIAG_FOR(Cuda13, cupti)
OOMDIAG_FOR(Cuda12, oomdiag_cupti)
OOMDIAG_OF_CUDA_12(oomdiag_cuptiSubscribe, "cuptiSubscribe", "libcupti");
OOMDIAG_OF_CUDA_12(oomdiag_cuptiUnsubscribe, "cuptiUnsubscribe", "libcupti");
OOMDIAG_OF_CUDA_12(oomdiag_cuptiEnableCallback, "cuptiEnableCallback", "libcupti");
OOMDIAG_OF_CUDA_12(oomdiag_cuptiEnableDomain, "cuptiEnableDomain", "libcupti");
OOMDIAG_OF_CUDA_12(oomdiag_cuptiEnableAllDomains, "cuptiEnableAllDomains", "libcupti");
OOMDIAG_OF_CUDA_12(oomdiag_cuptiGetCallbackState, "cuptiGetCallbackState", "libcupti");
OOMDIAG_OF_CUDA_12(oomdiag_cuptiFinalize, "cuptiFinalize", "libcupti");
