#pragma once

#include <string>

#include "extension/cupti/api.h"

namespace oomdiag {

// CUPTI lets one subscriber in (up to 13.2, or drivers older than r610). Kineto of torch 2.11 takes the slot when a first
// profile is prepared and keeps it to the end, whether or not it profiles: a collector that stood aside for it would never
// come back, and one that stays makes torch.profiler lose its CUDA activities. So the slot is shared: the preloaded shim
// defines all functions that take a subscriber's handle and concern its callbacks (interpose.cpp) and brings those calls here. Who subscribes while we
// hold the slot becomes our guest: it gets our handle, its own callbacks are called through ours, for what it enabled and
// nothing else, and nothing is lost on either side. While somebody else holds the slot, calls go to CUPTI unchanged.

/// What the shim calls. Same contracts as the functions of CUPTI.
struct CuptiGate {
  CUptiResult (*subscribe)(CUpti_SubscriberHandle*, CUpti_CallbackFunc, void*, CUpti_SubscriberParams*);
  CUptiResult (*unsubscribe)(CUpti_SubscriberHandle);
  CUptiResult (*enable_callback)(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId);
  CUptiResult (*enable_domain)(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain);
  CUptiResult (*enable_all_domains)(uint32_t, CUpti_SubscriberHandle);
  CUptiResult (*callback_state)(uint32_t*, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId);
  CUptiResult (*finalize)();
};

/// Takes the slot and enables the calls of driver_call.h and the loading of modules; `callback` gets those. "" or why not.
std::string take_slot(CUpti_CallbackFunc callback);

/// Whether somebody ended CUPTI since take_slot.
bool lost_slot() noexcept;

}  // namespace oomdiag
