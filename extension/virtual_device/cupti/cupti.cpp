// CUPTI over the virtual driver: one subscriber, whose callbacks in the driver's domain fire around the entry points that
// take or give memory, and when code is loaded (driver/callbacks.h). The Activity API accepts everything and has nothing to
// report, because no kernel runs: torch.profiler works, and shows no kernels.
//
// Names, structures and answers are those of cupti_callbacks.h and cupti_activity.h.

#include <cupti.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <mutex>

#include "extension/environment.h"
#include "extension/virtual_device/driver/callbacks.h"
#include "extension/virtual_device/driver/device.h"
#include "extension/virtual_device/driver/locks.h"
#include "extension/virtual_device/entry_point.h"

namespace {

constexpr size_t kMaxIds = 2048;

/// The subscriber. Written under the lock; the callback reads without it, as a callback may come at any time.
struct Subscriber {
  std::atomic<CUpti_CallbackFunc> function = nullptr;
  std::atomic<void*> user_data = nullptr;
  std::atomic<bool> enabled[CUPTI_CB_DOMAIN_SIZE][kMaxIds] = {};
  char name[CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN] = {};
};

auto& lock = *new oomdiag::LibraryLock;  // never destroyed: programs unsubscribe in their own destructors
auto& subscriber = *new Subscriber;
std::atomic<uint32_t> calls = 0;
thread_local uint64_t correlation_data = 0;
thread_local uint32_t correlation = 0;

CUpti_SubscriberHandle handle() { return reinterpret_cast<CUpti_SubscriberHandle>(&subscriber); }

bool is_known(CUpti_CallbackDomain domain, CUpti_CallbackId id) {
  return domain > CUPTI_CB_DOMAIN_INVALID && domain < CUPTI_CB_DOMAIN_SIZE && id < kMaxIds;
}

CUcontext current_context() {
  CUcontext context = nullptr;
  return cuCtxGetCurrent(&context) ? nullptr : context;
}

void notify_api(CUpti_CallbackFunc function, CUpti_CallbackId id, const char* name, const void* params,
                const CUresult* result) {
  if (!result) {
    correlation = ++calls;
    correlation_data = 0;
  }
  CUpti_CallbackData data{};
  data.callbackSite = result ? CUPTI_API_EXIT : CUPTI_API_ENTER;
  data.functionName = name;
  data.functionParams = params;
  data.functionReturnValue = const_cast<CUresult*>(result);
  data.context = current_context();
  data.contextUid = data.context ? 1 : 0;
  data.correlationData = &correlation_data;
  data.correlationId = correlation;
  function(subscriber.user_data, CUPTI_CB_DOMAIN_DRIVER_API, id, &data);
}

void notify_resource(CUpti_CallbackFunc function, CUpti_CallbackId id, const void* context) {
  CUpti_ModuleResourceData module{};
  CUpti_ResourceData data{};
  data.context = static_cast<CUcontext>(const_cast<void*>(context));
  data.resourceDescriptor = &module;
  function(subscriber.user_data, CUPTI_CB_DOMAIN_RESOURCE, id, &data);
}

void on_call(CUpti_CallbackDomain domain, CUpti_CallbackId id, const char* name, const void* params,
             const CUresult* result) {
  const CUpti_CallbackFunc function = subscriber.function;
  if (!function || !is_known(domain, id) || !subscriber.enabled[domain][id].load(std::memory_order_relaxed)) return;
  if (domain == CUPTI_CB_DOMAIN_RESOURCE) return notify_resource(function, id, params);
  notify_api(function, id, name, params, result);
}

/// OOMDIAG_CUPTI_HOLDER names a tool that holds the only slot from the start, as nsys does: for tests.
const char* holder_from_outside() {
  const char* name = oomdiag::variables::text(oomdiag::variables::kCuptiHolder);
  return *name ? name : nullptr;
}

CUptiResult reject(const char* holder, CUpti_SubscriberParams* parameters) {
  if (parameters && parameters->oldSubscriberName) {
    std::snprintf(parameters->oldSubscriberName, parameters->oldSubscriberSize, "%s", holder);
  }
  return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
}

CUptiResult subscribe(CUpti_SubscriberHandle* given, CUpti_CallbackFunc function, void* user_data,
                      CUpti_SubscriberParams* parameters) {
  if (!given || !function) return CUPTI_ERROR_INVALID_PARAMETER;
  if (cuInit(0)) return CUPTI_ERROR_UNKNOWN;  // what the real one answers where there is no driver
  std::lock_guard guard(lock);
  if (const char* holder = holder_from_outside()) return reject(holder, parameters);
  if (subscriber.function.load()) return reject(subscriber.name, parameters);
  const char* name = parameters && parameters->subscriberName ? parameters->subscriberName : "unknown";
  std::snprintf(subscriber.name, sizeof subscriber.name, "CUPTI for %.*s", CUPTI_SUBSCRIBER_NAME_MAX_LEN, name);
  subscriber.user_data = user_data;
  subscriber.function = function;
  oomdiag_device_set_callback(on_call);
  *given = handle();
  return CUPTI_SUCCESS;
}

void forget_subscriber() {
  oomdiag_device_set_callback(nullptr);
  subscriber.function = nullptr;
  for (auto& domain : subscriber.enabled) {
    for (auto& enabled : domain) enabled = false;
  }
}

CUptiResult enable_domain(bool enable, CUpti_CallbackDomain domain) {
  if (!is_known(domain, 0)) return CUPTI_ERROR_INVALID_PARAMETER;
  for (auto& enabled : subscriber.enabled[domain]) enabled = enable;
  return CUPTI_SUCCESS;
}

}  // namespace

OOMDIAG_ENTRY_POINT CUptiResult cuptiGetResultString(CUptiResult result, const char** text) {
  *text = result == CUPTI_SUCCESS                                    ? "CUPTI_SUCCESS"
          : result == CUPTI_ERROR_NOT_SUPPORTED                      ? "CUPTI_ERROR_NOT_SUPPORTED"
          : result == CUPTI_ERROR_INVALID_PARAMETER                  ? "CUPTI_ERROR_INVALID_PARAMETER"
          : result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"
                                                                     : "CUPTI_ERROR_UNKNOWN";
  return CUPTI_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUptiResult cuptiGetTimestamp(uint64_t* time_ns) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  *time_ns = static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
  return CUPTI_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* given, CUpti_CallbackFunc function,
                                               void* user_data) {
  return subscribe(given, function, user_data, nullptr);
}

OOMDIAG_ENTRY_POINT CUptiResult cuptiSubscribe_v2(CUpti_SubscriberHandle* given, CUpti_CallbackFunc function,
                                                  void* user_data, CUpti_SubscriberParams* parameters) {
  if (parameters && parameters->structSize == 0) return CUPTI_ERROR_INVALID_PARAMETER;
  return subscribe(given, function, user_data, parameters);
}

OOMDIAG_ENTRY_POINT CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle given) {
  std::lock_guard guard(lock);
  if (given != handle() || !subscriber.function.load()) return CUPTI_ERROR_INVALID_PARAMETER;
  forget_subscriber();
  return CUPTI_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUptiResult cuptiFinalize() {
  std::lock_guard guard(lock);
  forget_subscriber();
  return CUPTI_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUptiResult cuptiEnableCallback(uint32_t enable, CUpti_SubscriberHandle given,
                                                    CUpti_CallbackDomain domain, CUpti_CallbackId id) {
  std::lock_guard guard(lock);
  if (given != handle() || !is_known(domain, id)) return CUPTI_ERROR_INVALID_PARAMETER;
  subscriber.enabled[domain][id] = enable != 0;
  return CUPTI_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUptiResult cuptiEnableDomain(uint32_t enable, CUpti_SubscriberHandle given,
                                                  CUpti_CallbackDomain domain) {
  std::lock_guard guard(lock);
  return given == handle() ? enable_domain(enable != 0, domain) : CUPTI_ERROR_INVALID_PARAMETER;
}

OOMDIAG_ENTRY_POINT CUptiResult cuptiEnableAllDomains(uint32_t enable, CUpti_SubscriberHandle given) {
  std::lock_guard guard(lock);
  if (given != handle()) return CUPTI_ERROR_INVALID_PARAMETER;
  for (int domain = 1; domain < CUPTI_CB_DOMAIN_SIZE; ++domain) {
    enable_domain(enable != 0, static_cast<CUpti_CallbackDomain>(domain));
  }
  return CUPTI_SUCCESS;
}

OOMDIAG_ENTRY_POINT CUptiResult cuptiGetCallbackState(uint32_t* enabled, CUpti_SubscriberHandle given,
                                                      CUpti_CallbackDomain domain, CUpti_CallbackId id) {
  if (given != handle() || !is_known(domain, id)) return CUPTI_ERROR_INVALID_PARAMETER;
  *enabled = subscriber.enabled[domain][id] ? 1 : 0;
  return CUPTI_SUCCESS;
}

// The Activity API: nothing ever happens.

OOMDIAG_ENTRY_POINT CUptiResult cuptiActivityGetNextRecord(uint8_t*, size_t, CUpti_Activity**) {
  return CUPTI_ERROR_MAX_LIMIT_REACHED;
}
OOMDIAG_ENTRY_POINT CUptiResult cuptiActivityGetAttribute(CUpti_ActivityAttribute, size_t* size, void* value) {
  if (size && value) std::memset(value, 0, *size);
  return CUPTI_SUCCESS;
}
