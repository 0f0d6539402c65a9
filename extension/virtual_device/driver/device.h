#pragma once

#include <cuda.h>

#include "extension/virtual_device/entry_point.h"

// What libcuda.so.1 exports beside the driver API: what its sibling mocks need and the driver API does not offer, and
// what the recorder asks. Everything else between the mocks goes by the documented driver API, as in the real stack.

/// Calls `on_note` once for each noted fact, those of the past at once: ("unsupported", a stubbed name that was called)
/// or ("estimate", a name whose answer is an estimate). Called on the noting thread; null stops it. That this symbol
/// exists tells the recorder that the device is virtual.
OOMDIAG_ENTRY_POINT void oomdiag_device_set_observer(void (*on_note)(const char* kind, const char* name));

/// Notes a fact once per process. Both strings must live as long as the process.
OOMDIAG_ENTRY_POINT void oomdiag_device_note(const char* kind, const char* name);

/// Work submitted to `stream`: the first charges the card with its kernels; a capturing stream gets a node of `type`.
OOMDIAG_ENTRY_POINT CUresult oomdiag_device_submit(CUstream stream, CUgraphNodeType type);

/// A library handle (cuBLAS, cuDNN) is made on the current device: it takes what a first kernel takes.
OOMDIAG_ENTRY_POINT CUresult oomdiag_device_use_library();

/// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED where a capture forbids an unsafe call (allocation, synchronisation) on this thread.
OOMDIAG_ENTRY_POINT CUresult oomdiag_device_check_capture();

/// Copies between any two places and sets any place, as far as contents are kept. No stream order: work is done at once.
OOMDIAG_ENTRY_POINT void oomdiag_device_copy(void* to, const void* from, size_t bytes);
OOMDIAG_ENTRY_POINT void oomdiag_device_fill(void* to, int value, size_t bytes);

/// With contents kept: what the host wrote to a block is forgotten when the caching allocator hands it to a new owner.
OOMDIAG_ENTRY_POINT void oomdiag_device_forget(void* block, size_t bytes);

/// The bytes taken of `device`, context included; 0 before it has one.
OOMDIAG_ENTRY_POINT int64_t oomdiag_device_used_bytes(int device);

/// The newest architecture built into the wheel that `device` runs, such as 86.
OOMDIAG_ENTRY_POINT int oomdiag_device_architecture(int device);

/// `device` as cuDNN wants it described (JSON); lives as long as the process. Null for no such device.
OOMDIAG_ENTRY_POINT const char* oomdiag_device_cudnn_description(int device);

/// What the card's data file says that `device` takes before PyTorch does: its context and the first kernel.
OOMDIAG_ENTRY_POINT int64_t oomdiag_device_context_bytes(int device);
