#pragma once

#include <cupti.h>

// CUPTI as this file was compiled for: its major version is that of the CUDA whose headers these are, and so of the torch that
// the recorder is for. What later versions added is declared here for older headers, whose CUPTI never reports it.

#if CUDA_VERSION >= 13000
#define OOMDIAG_CUPTI_LIBRARY "libcupti.so.13"
#else
#define OOMDIAG_CUPTI_LIBRARY "libcupti.so.12"
#endif

#if CUDA_VERSION < 12050
constexpr auto CUPTI_DRIVER_TRACE_CBID_cuCtxCreate_v4 = static_cast<CUpti_driver_api_trace_cbid>(757);
struct cuCtxCreate_v4_params {
  CUcontext* pctx;
  void* ctxCreateParams;
  unsigned int flags;
  CUdevice dev;
};
#endif

// Since 13.0, looked up by name.
#ifndef CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN
#define CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN 64
#define CUpti_SubscriberParams_STRUCT_SIZE sizeof(CUpti_SubscriberParams)
struct CUpti_SubscriberParams {
  size_t structSize;
  const char* subscriberName;
  char* oldSubscriberName;
  size_t oldSubscriberSize;
};
CUptiResult cuptiSubscribe_v2(CUpti_SubscriberHandle*, CUpti_CallbackFunc, void*, CUpti_SubscriberParams*);
#endif
