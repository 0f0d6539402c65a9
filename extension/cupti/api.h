#pragma once

#include <cupti.h>

// CUPTI as this file was compiled for: its major version is that of the CUDA whose headers these are, and so of the torch that
// the recorder is for. What CUDA 13 added is declared here for older headers; it is looked up by name and not there then.

#if CUDA_VERSION >= 13000
#define OOMDIAG_CUPTI_LIBRARY "libcupti.so.13"
#else
#define OOMDIAG_CUPTI_LIBRARY "libcupti.so.12"
#endif

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
