#include "extension/cupti/slot.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <bitset>
#include <cstdio>
#include <mutex>

#include "extension/cupti/api.h"
#include "extension/cupti/driver_call.h"

namespace oomdiag {
namespace {

constexpr size_t kMaxIds = 2048;
constexpr CUpti_CallbackId kResources[] = {CUPTI_CBID_RESOURCE_CONTEXT_CREATED,
                                           CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING,
                                           CUPTI_CBID_RESOURCE_MODULE_LOADED};
constexpr CUpti_CallbackId kContexts[] = {CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRetain,
                                          CUPTI_DRIVER_TRACE_CBID_cuCtxCreate_v2,
                                          CUPTI_DRIVER_TRACE_CBID_cuCtxCreate_v4};

/// The functions of CUPTI that are used: the one that torch uses, never another.
struct Cupti {
  decltype(&cuptiSubscribe) subscribe = nullptr;
  decltype(&cuptiSubscribe_v2) subscribe_v2 = nullptr;  // since 13.0
  decltype(&cuptiUnsubscribe) unsubscribe = nullptr;
  decltype(&cuptiEnableCallback) enable_callback = nullptr;
  decltype(&cuptiEnableDomain) enable_domain = nullptr;
  decltype(&cuptiEnableAllDomains) enable_all_domains = nullptr;
  decltype(&cuptiGetCallbackState) callback_state = nullptr;
  decltype(&cuptiFinalize) finalize = nullptr;
  decltype(&cuptiGetResultString) result_string = nullptr;

  bool is_complete() const {
    return subscribe && unsubscribe && enable_callback && enable_domain && enable_all_domains && callback_state &&
           finalize;
  }
};

Cupti find_cupti() {
  Cupti cupti;
  void* library = dlopen(OOMDIAG_CUPTI_LIBRARY, RTLD_NOW | RTLD_NOLOAD);  // libtorch_cpu needs it, so it is there
  if (library == nullptr) return cupti;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
  };
  find(cupti.subscribe, "cuptiSubscribe");
  find(cupti.subscribe_v2, "cuptiSubscribe_v2");
  find(cupti.unsubscribe, "cuptiUnsubscribe");
  find(cupti.enable_callback, "cuptiEnableCallback");
  find(cupti.enable_domain, "cuptiEnableDomain");
  find(cupti.enable_all_domains, "cuptiEnableAllDomains");
  find(cupti.callback_state, "cuptiGetCallbackState");
  find(cupti.finalize, "cuptiFinalize");
  find(cupti.result_string, "cuptiGetResultString");
  return cupti;
}

const Cupti& cupti() {
  static const Cupti found = find_cupti();
  return found;
}

/// Who shares our slot. `enabled` has its own bits, so that it does not get the callbacks that only we enabled.
struct Guest {
  std::atomic<CUpti_CallbackFunc> callback = nullptr;
  std::atomic<void*> user_data = nullptr;
  std::atomic<bool> enabled[CUPTI_CB_DOMAIN_SIZE][kMaxIds] = {};
};

auto& lock = *new std::recursive_mutex;  // recursive: a callback may subscribe. Never destroyed
auto& guest = *new Guest;
auto& ours =
    *new std::array<std::bitset<kMaxIds>, CUPTI_CB_DOMAIN_SIZE>;  // what we enable; fixed before the slot is taken
std::atomic<CUpti_CallbackFunc> own_callback = nullptr;
std::atomic<CUpti_SubscriberHandle> slot = nullptr;
std::atomic<bool> lost = false;

bool is_known(CUpti_CallbackDomain domain, CUpti_CallbackId id) {
  return domain > CUPTI_CB_DOMAIN_INVALID && domain < CUPTI_CB_DOMAIN_SIZE && id < kMaxIds;
}

// Which domains there are differs between versions of the headers.
template <typename Visit>
void visit_domains(Visit visit) {
  for (int number = CUPTI_CB_DOMAIN_INVALID + 1; number < CUPTI_CB_DOMAIN_SIZE; ++number) {
    visit(static_cast<CUpti_CallbackDomain>(number));
  }
}

void call_guest(CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data) {
  const CUpti_CallbackFunc call = guest.callback.load(std::memory_order_acquire);
  if (call != nullptr) call(guest.user_data, domain, id, data);
}

// A domain or an id of a later CUPTI is none of ours: only the guest can have enabled it.
void CUPTIAPI share_callback(void*, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data) {
  if (!is_known(domain, id)) return call_guest(domain, id, data);
  if (ours[domain][id]) own_callback.load()(nullptr, domain, id, data);
  if (guest.enabled[domain][id].load(std::memory_order_relaxed)) call_guest(domain, id, data);
}

void choose_ours() {
  for (const CUpti_CallbackId id : memory_calls()) ours[CUPTI_CB_DOMAIN_DRIVER_API].set(id);
  for (const CUpti_CallbackId id : kContexts) ours[CUPTI_CB_DOMAIN_DRIVER_API].set(id);
  for (const CUpti_CallbackId id : kResources) ours[CUPTI_CB_DOMAIN_RESOURCE].set(id);
}

void enable_ours() {
  for (const CUpti_CallbackDomain domain : {CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_CB_DOMAIN_RESOURCE}) {
    for (CUpti_CallbackId id = 0; id < kMaxIds; ++id) {
      if (ours[domain][id]) cupti().enable_callback(1, slot, domain, id);
    }
  }
}

void enable_for_guest(CUpti_CallbackDomain domain, bool enable) {
  for (auto& enabled : guest.enabled[domain]) enabled = enable;
}

void clear_guest() {
  guest.callback = nullptr;
  visit_domains([](CUpti_CallbackDomain domain) { enable_for_guest(domain, false); });
}

std::string describe_failure(CUptiResult result, const char* holder) {
  if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED) {
    return std::string("CUPTI, which lets one tool in, is held by ") + (*holder != '\0' ? holder : "another tool");
  }
  const char* text = nullptr;
  if (cupti().result_string != nullptr) cupti().result_string(result, &text);
  return "CUPTI answers " + std::string(text != nullptr ? text : "an error") + " (" + std::to_string(result) + ")";
}

CUptiResult subscribe_ourselves(CUpti_SubscriberHandle* handle, char* holder, size_t holder_bytes) {
  if (cupti().subscribe_v2 == nullptr) return cupti().subscribe(handle, share_callback, nullptr);
  CUpti_SubscriberParams parameters{};
  parameters.structSize = CUpti_SubscriberParams_STRUCT_SIZE;
  parameters.subscriberName = "oomdiag";
  parameters.oldSubscriberName = holder;
  parameters.oldSubscriberSize = holder_bytes;
  const CUptiResult result = cupti().subscribe_v2(handle, share_callback, nullptr, &parameters);
  // An older CUPTI than the headers may not like the size of the structure.
  return result == CUPTI_ERROR_INVALID_PARAMETER ? cupti().subscribe(handle, share_callback, nullptr) : result;
}

// --- what the shim brings ---

bool is_guests(CUpti_SubscriberHandle handle) {
  return handle != nullptr && handle == slot && guest.callback.load() != nullptr;
}

CUptiResult gate_subscribe(CUpti_SubscriberHandle* handle, CUpti_CallbackFunc callback, void* user_data,
                           CUpti_SubscriberParams* parameters) {
  const std::lock_guard guard(lock);
  if (!cupti().is_complete()) return CUPTI_ERROR_UNKNOWN;
  if (slot.load() != nullptr && guest.callback.load() == nullptr && handle != nullptr && callback != nullptr) {
    guest.user_data = user_data;
    guest.callback = callback;
    *handle = slot;
    return CUPTI_SUCCESS;
  }
  if (parameters != nullptr && cupti().subscribe_v2 != nullptr)
    return cupti().subscribe_v2(handle, callback, user_data, parameters);
  return cupti().subscribe(handle, callback, user_data);
}

CUptiResult gate_enable_callback(uint32_t enable, CUpti_SubscriberHandle handle, CUpti_CallbackDomain domain,
                                 CUpti_CallbackId id) {
  const std::lock_guard guard(lock);
  if (!is_guests(handle) || !is_known(domain, id)) return cupti().enable_callback(enable, handle, domain, id);
  guest.enabled[domain][id] = enable != 0;
  return enable == 0 && ours[domain][id] ? CUPTI_SUCCESS : cupti().enable_callback(enable, handle, domain, id);
}

// Where some callbacks of a domain are ours the others are disabled one by one: if the whole domain were disabled and ours
// enabled again, calls of other threads in between would be lost. Ids that CUPTI does not have are no error.
CUptiResult disable_guests(CUpti_CallbackDomain domain) {
  if (ours[domain].none()) {
    enable_for_guest(domain, false);
    return cupti().enable_domain(0, slot, domain);
  }
  for (CUpti_CallbackId id = 0; id < kMaxIds; ++id) {
    if (guest.enabled[domain][id].exchange(false) && !ours[domain][id]) cupti().enable_callback(0, slot, domain, id);
  }
  return CUPTI_SUCCESS;
}

CUptiResult gate_enable_domain(uint32_t enable, CUpti_SubscriberHandle handle, CUpti_CallbackDomain domain) {
  const std::lock_guard guard(lock);
  if (!is_guests(handle) || !is_known(domain, 0)) return cupti().enable_domain(enable, handle, domain);
  if (enable == 0) return disable_guests(domain);
  const CUptiResult result = cupti().enable_domain(1, handle, domain);
  if (result == CUPTI_SUCCESS) enable_for_guest(domain, true);
  return result;
}

// Domains that a CUPTI does not have yet are no error here: the caller named none.
CUptiResult gate_enable_all_domains(uint32_t enable, CUpti_SubscriberHandle handle) {
  const std::lock_guard guard(lock);
  if (!is_guests(handle)) return cupti().enable_all_domains(enable, handle);
  const CUptiResult result = enable != 0 ? cupti().enable_all_domains(1, handle) : CUPTI_SUCCESS;
  if (result != CUPTI_SUCCESS) return result;
  visit_domains([enable](CUpti_CallbackDomain domain) {
    if (enable != 0) {
      enable_for_guest(domain, true);
    } else {
      disable_guests(domain);
    }
  });
  return CUPTI_SUCCESS;
}

// What only we enabled is not enabled for the guest.
CUptiResult gate_callback_state(uint32_t* enabled, CUpti_SubscriberHandle handle, CUpti_CallbackDomain domain,
                                CUpti_CallbackId id) {
  const std::lock_guard guard(lock);
  const CUptiResult result = cupti().callback_state(enabled, handle, domain, id);
  if (result == CUPTI_SUCCESS && is_guests(handle) && is_known(domain, id)) *enabled = guest.enabled[domain][id];
  return result;
}

CUptiResult gate_unsubscribe(CUpti_SubscriberHandle handle) {
  const std::lock_guard guard(lock);
  if (!is_guests(handle)) return cupti().unsubscribe(handle);
  gate_enable_all_domains(0, handle);
  clear_guest();
  return CUPTI_SUCCESS;
}

CUptiResult gate_finalize() {
  const std::lock_guard guard(lock);
  const CUptiResult result = cupti().finalize();
  clear_guest();
  if (slot.exchange(nullptr) != nullptr) lost = true;
  return result;
}

constexpr CuptiGate kGate{.subscribe = gate_subscribe,
                          .unsubscribe = gate_unsubscribe,
                          .enable_callback = gate_enable_callback,
                          .enable_domain = gate_enable_domain,
                          .enable_all_domains = gate_enable_all_domains,
                          .callback_state = gate_callback_state,
                          .finalize = gate_finalize};

}  // namespace

std::string take_slot(CUpti_CallbackFunc callback) {
  const std::lock_guard guard(lock);
  if (!cupti().is_complete()) return OOMDIAG_CUPTI_LIBRARY " is not loaded";
  own_callback = callback;
  choose_ours();
  CUpti_SubscriberHandle handle = nullptr;
  char holder[2 * CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN] = {};
  const CUptiResult result = subscribe_ourselves(&handle, holder, sizeof holder);
  if (result != CUPTI_SUCCESS) return describe_failure(result, holder);
  slot = handle;
  lost = false;
  enable_ours();
  return {};
}

bool lost_slot() noexcept { return lost.load(std::memory_order_relaxed); }

const CuptiGate* cupti_gate() noexcept { return &kGate; }

}  // namespace oomdiag
