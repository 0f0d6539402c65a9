// Another tool that uses CUPTI in the same process: it wants the only slot, and the beginnings and ends of cuMemAlloc.

#include <cupti.h>

#include <atomic>

#define CALLED_BY_TESTS extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<int> calls = 0;
CUpti_SubscriberHandle subscriber = nullptr;

void CUPTIAPI on_callback(void* user_data, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void*) {
  // Anything but what it asked for would be a fault: counted where it shows.
  const bool wanted = domain == CUPTI_CB_DOMAIN_DRIVER_API && id == CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2;
  *static_cast<std::atomic<int>*>(user_data) += wanted ? 1 : 1000;
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
