#pragma once

#include <cstdint>

#include "extension/virtual_device/device_files/gpu.h"
#include "extension/virtual_device/driver/stream.h"

// Time. Unless OOMDIAG_CLOCKED=1, work is done when it is submitted. With it, each stream has a clock that says when its
// work will be done, and the host has one that follows from the calls that it makes:
//
//   submit           host = host + 5 us;  stream = max(stream, host) + the time of the work
//   record, wait     event = stream;  stream = max(stream, event)
//   query            not ready while the stream or event is ahead of the host, which waits between two such answers
//   synchronise      host = max(host, stream or event)
//
// So a block that another stream still uses stays pending, as on a GPU, and a program has the same times however slow the
// machine is: real time counts for nothing. How long work takes is modelled at the GPU's peak rates from what a launch shows:
// its threads, the bytes of a copy, the sizes of a product or convolution. What a kernel really does is not known; the order of
// magnitude is what matters.
//
// A program that asks again and again until work is done comes to an end, for each thread waits twice as long after each
// "not ready" in a row, up to when the work is done. Such waiting is the thread's own until it submits or synchronises: a
// thread that only watches, as NCCL's watchdog in PyTorch does, moves no clock.

namespace oomdiag {

bool is_clocked() noexcept;

/// Nanoseconds of the host's clock as this thread has it; of CLOCK_MONOTONIC when nothing takes time.
int64_t host_time_ns() noexcept;

/// Whether work that ends then is not done yet. This thread has waited a little before it asks again.
bool is_pending(int64_t end_ns) noexcept;

/// The host waits until then.
void wait_until(int64_t time_ns) noexcept;

/// What a piece of work moves and computes.
struct Work {
  double memory_bytes = 0;  ///< of the GPU's own memory
  double bus_bytes = 0;     ///< between host and GPU, or two GPUs
  double flops = 0;         ///< in 32 bits
};

/// Puts work onto the stream's clock, or onto the graph that the stream is being captured into.
void add_work(Stream& stream, const Work& work);

/// The same for work whose time is known.
void add_time(Stream& stream, int64_t time_ns);

/// What so many cycles of the GPU's clock take; nothing where the clock is not known.
int64_t time_of_cycles(const Gpu& gpu, int64_t cycles);

/// When the stream will be done; the legacy stream waits for those that wait for it.
int64_t end_of(const Stream& stream) noexcept;

/// Memory traffic of a launch: threads of PyTorch's elementwise kernels read and write four values of four bytes each.
constexpr Work work_of_threads(double threads) { return {.memory_bytes = threads * 32}; }

}  // namespace oomdiag
