#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

#include "extension/virtual_device/driver/devices.h"
#include "extension/virtual_device/driver/limits.h"

namespace oomdiag {

struct Stream;

/// The primary context of a device, or one of cuCtxCreate. Each takes of the GPU what a context takes and, with its first
/// kernel, what code takes. Its handle is its address. None is ever freed: a handle of one that is destroyed is
/// distinguished from others.
struct Context {
  Device* device = nullptr;
  uint64_t id = 0;
  Stream* legacy_stream = nullptr;
  std::atomic<bool> is_alive = false;  ///< it was made, and not destroyed since
  std::atomic<bool> has_kernels = false;
  std::atomic<int> references = 0;  ///< to a primary one, by cuDevicePrimaryCtxRetain
  std::atomic<uint64_t> times_destroyed = 0;
  int64_t graph_bytes = 0;                   ///< of executables, before rounding to pages; under memory_lock()
  Limits limits{};                           ///< what kernels may use; under memory_lock()
  std::atomic<int64_t> end_ns = 0;           ///< clock.h: when all its work will be done,
  std::atomic<int64_t> legacy_end_ns = 0;    ///< that on its legacy stream,
  std::atomic<int64_t> blocking_end_ns = 0;  ///< and that on the streams which wait for the legacy stream
};

inline CUcontext context_handle(Context* context) { return reinterpret_cast<CUcontext>(context); }

/// The context behind a handle, destroyed ones included; null for no handle of ours.
Context* find_context(CUcontext handle) noexcept;

Context& primary_context(Device& device) noexcept;

/// The thread's current context; null where it has none or that is destroyed. The second gives that one, too.
Context* current_context() noexcept;
Context* chosen_context() noexcept;
void set_current_context(Context* context) noexcept;

/// Success, or why the thread has no current context: CUDA_ERROR_INVALID_CONTEXT, or …_CONTEXT_IS_DESTROYED.
CUresult check_context() noexcept;

/// The thread's current context where it is of that device, else the device's primary one.
Context& context_on(Device& device) noexcept;

/// A context beside the primary one, not made yet.
Context& add_context(Device& device);

/// Makes the context: properties and device count must not on a real GPU. CUDA_ERROR_OUT_OF_MEMORY where the GPU has
/// too little memory for it; the next call tries again.
CUresult make_context(Context& context);

/// The first kernel or library handle takes its share of the GPU; the same.
CUresult load_kernels(Context& context);

/// Whether this process has a context of the device, which is when NVML lists it.
bool holds_context(const Device& device);

/// Takes back all that cuda.h says goes with a context (cuCtxDestroy), and its share of the GPU; of a primary one also the
/// memory that is of its device and of no context (cuDevicePrimaryCtxReset). A primary one may be created again.
void destroy_context(Context& context);

}  // namespace oomdiag
