// Another tool that uses CUPTI in the same process: it wants the only slot, and the beginnings and ends of cuMemAlloc; or, as
// Extrae and VampirTrace do, all callbacks of all domains.

#include <cupti.h>

#include <atomic>

#define CALLED_BY_TESTS extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<int> calls = 0;
std::atomic<int> allocations = 0;
CUpti_SubscriberHandle subscriber = nullptr;

bool is_allocation(CUpti_CallbackDomain domain, CUpti_CallbackId id) {
  return domain == CUPTI_CB_DOMAIN_DRIVER_API && id == CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2;
}

void CUPTIAPI on_callback(void* user_data, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void*) {
  // Anything but what it asked for would be a fault: counted where it shows.
  *static_cast<std::atomic<int>*>(user_data) += is_allocation(domain, id) ? 1 : 1000;
}

void CUPTIAPI on_any_callback(void*, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void*) {
  if (is_allocation(domain, id)) ++allocations;
}

}  // namespace

CALLED_BY_TESTS int subscribe() {
  const int result = cuptiSubscribe(&subscriber, on_callback, &calls);
  if (result != CUPTI_SUCCESS) return result;
  return cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2);
}
CALLED_BY_TESTS int subscribe_again() {
  CUpti_SubscriberHandle other = nullptr;
  return cuptiSubscribe(&other, on_callback, &calls);
}
CALLED_BY_TESTS int heard() { return calls; }
CALLED_BY_TESTS int unsubscribe() {
  cuptiEnableDomain(1, subscriber, CUPTI_CB_DOMAIN_RESOURCE);
  cuptiEnableDomain(0, subscriber, CUPTI_CB_DOMAIN_RESOURCE);
  cuptiEnableCallback(0, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2);
  return cuptiUnsubscribe(subscriber);
}
CALLED_BY_TESTS int finalize() { return cuptiFinalize(); }

// All callbacks: 0 or CUPTI's error.
CALLED_BY_TESTS int subscribe_to_all() {
  const int result = cuptiSubscribe(&subscriber, on_any_callback, nullptr);
  return result != CUPTI_SUCCESS ? result : static_cast<int>(cuptiEnableAllDomains(1, subscriber));
}
CALLED_BY_TESTS int enable_all(unsigned enable) { return cuptiEnableAllDomains(enable, subscriber); }
CALLED_BY_TESTS int enable_driver(unsigned enable) {
  return cuptiEnableDomain(enable, subscriber, CUPTI_CB_DOMAIN_DRIVER_API);
}
CALLED_BY_TESTS int heard_allocations() { return allocations; }
// Whether CUPTI says that the beginnings and ends of cuMemAlloc come to us.
CALLED_BY_TESTS int receives_allocations() {
  uint32_t enabled = 0;
  cuptiGetCallbackState(&enabled, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2);
  return enabled != 0 ? 1 : 0;
}
