#pragma once

#include <cupti.h>

#include "extension/virtual_device/entry_point.h"

// What the virtual CUPTI (extension/virtual_device/cupti) hears of the driver. An entry point that takes or gives memory
// begins with one line, the name with its version as CUPTI counts it and all its arguments:
//
//   OOMDIAG_OBSERVED(cuMemAlloc_v2, block, bytes);
//
// While somebody listens it reports the call's beginning and end, with the parameters in the structure that
// generated_cuda_meta.h documents, and runs the entry point in between. As with the real driver only the outermost call of
// a thread is reported, so what a callback itself calls is not.

/// How the virtual CUPTI is notified. `result` is null at the beginning of a call; `params` of a resource is its
/// CUcontext.
using OomdiagCallback = void (*)(CUpti_CallbackDomain domain, CUpti_CallbackId id, const char* name, const void* params,
                                 const CUresult* result);

/// From now on `callback` is called; null: none.
OOMDIAG_ENTRY_POINT void oomdiag_device_set_callback(OomdiagCallback callback);

namespace oomdiag {

/// Whether a callback is set, and this is not a call inside of a call.
bool is_observed() noexcept;

/// Something of the resource domain has happened: a context was created, or its first kernel or library has loaded its code.
void notify_resource(CUpti_CallbackIdResource what, const void* context);

/// The GPU has too little memory for what the driver itself requested on somebody's behalf, a context or its code:
/// reported as a cuMemAlloc of so many bytes that failed, for CUPTI has no other word for it, and to the OOM observer
/// (device.h).
void notify_oom(int64_t bytes);

/// A call of the driver from its beginning (construction) to its end.
class ObservedCall {
 public:
  ObservedCall(CUpti_CallbackId id, const char* name, const void* params);
  ~ObservedCall();
  ObservedCall(const ObservedCall&) = delete;
  ObservedCall& operator=(const ObservedCall&) = delete;

  CUresult end(CUresult result);

 private:
  CUpti_CallbackId id_;
  const char* name_;
  const void* params_;
};

template <typename Params, typename Call>
CUresult observe(CUpti_CallbackId id, const char* name, const Params& params, Call call) {
  ObservedCall observed(id, name, &params);
  return observed.end(call());
}

}  // namespace oomdiag

#define OOMDIAG_OBSERVED(function, ...)                                                                  \
  if (oomdiag::is_observed()) [[unlikely]]                                                               \
  return oomdiag::observe(CUPTI_DRIVER_TRACE_CBID_##function, #function, function##_params{__VA_ARGS__}, \
                          [&] { return function(__VA_ARGS__); })
