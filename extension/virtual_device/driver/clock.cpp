#include "extension/virtual_device/driver/clock.h"

#include <algorithm>
#include <atomic>
#include <ctime>

#include "extension/environment.h"
#include "extension/virtual_device/device_files/gpu.h"
#include "extension/virtual_device/driver/capture.h"
#include "extension/virtual_device/driver/stream.h"

namespace oomdiag {
namespace {

constexpr int64_t kLeastNs = 4000;   // the shortest kernel, from its start to the start of the next
constexpr int64_t kSubmitNs = 5000;  // what the host takes for a launch: a few microseconds, with PyTorch around it
constexpr int64_t kQueryNs = 1000;   // and for a question
constexpr double kBusBytesPerSecond = 25e9;  // PCI Express 4.0 x16 carries 31.5 GB/s at most, copies come near 25

std::atomic<int64_t> host_ns = 0;

/// What this thread has waited by asking, since it last submitted or synchronised.
struct Polling {
  int64_t waited_ns = 0;
  int64_t next_ns = kQueryNs;
};
thread_local Polling polling;

/// The host's clock is at least this. What was waited by asking becomes everybody's.
void advance_host(int64_t time_ns) noexcept {
  int64_t before = host_ns.load();
  while (before < time_ns && !host_ns.compare_exchange_weak(before, time_ns)) {
  }
  polling = {};
}

int64_t real_time_ns() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

/// Both edges of the memory clock carry data.
double memory_rate(const Gpu& gpu) { return 2.0 * gpu.memory_clock_khz * 1e3 * gpu.memory_bus_bits / 8; }

/// CUDA programming guide, "Arithmetic instructions": 64 or 128 multiply-adds a cycle on each multiprocessor.
double flop_rate(const Gpu& gpu) {
  const int lanes = gpu.compute_major == 7 || (gpu.compute_major == 8 && gpu.compute_minor == 0) ? 64 : 128;
  return 2.0 * lanes * gpu.multiprocessors * gpu.clock_khz * 1e3;
}

/// Seconds for `amount` at `rate`; a device file may not know a rate.
double seconds(double amount, double rate) { return rate > 0 ? amount / rate : 0; }

int64_t time_of(const Gpu& gpu, const Work& work) {
  const double longest = std::max({seconds(work.memory_bytes, memory_rate(gpu)),
                                   seconds(work.bus_bytes, kBusBytesPerSecond), seconds(work.flops, flop_rate(gpu))});
  return std::max(kLeastNs, static_cast<int64_t>(longest * 1e9));
}

bool is_legacy(const Stream& stream) { return stream.id == 0; }
bool is_blocking(const Stream& stream) { return !(stream.flags & CU_STREAM_NON_BLOCKING); }

/// CUDA programming guide, "Legacy default stream": it and the blocking streams wait for each other.
int64_t start_on(const Stream& stream) {
  const int64_t now = std::max(host_time_ns(), end_of(stream));
  return is_blocking(stream) && !is_legacy(stream) ? std::max<int64_t>(now, stream.context->legacy_end_ns) : now;
}

}  // namespace

bool is_clocked() noexcept {
  static const bool clocked = variables::is_on(variables::kClocked);
  return clocked;
}

int64_t host_time_ns() noexcept { return is_clocked() ? host_ns.load() + polling.waited_ns : real_time_ns(); }

void wait_until(int64_t time_ns) noexcept {
  if (is_clocked()) advance_host(std::max(time_ns, host_time_ns()));
}

bool is_pending(int64_t end_ns) noexcept {
  if (!is_clocked() || end_ns <= host_time_ns()) return false;
  polling.waited_ns += std::min(polling.next_ns, end_ns - host_time_ns());
  polling.next_ns *= 2;
  return true;
}

int64_t time_of_cycles(const Gpu& gpu, int64_t cycles) {
  return static_cast<int64_t>(seconds(static_cast<double>(cycles), gpu.clock_khz * 1e3) * 1e9);
}

void add_work(Stream& stream, const Work& work) {
  if (!is_clocked()) return;
  advance_host(host_time_ns() + kSubmitNs);
  add_time(stream, time_of(stream.context->device->gpu, work));
}

void add_time(Stream& stream, int64_t time_ns) {
  if (!is_clocked()) return;
  std::lock_guard guard(stream_lock());
  if (stream.capture) {
    stream.capture->graph->body->time_ns += time_ns;
    return;
  }
  const int64_t end = start_on(stream) + time_ns;
  stream.end_ns = end;
  Context& context = *stream.context;
  context.end_ns = std::max<int64_t>(context.end_ns, end);
  if (is_legacy(stream)) {
    context.legacy_end_ns = end;
  } else if (is_blocking(stream)) {
    context.blocking_end_ns = std::max<int64_t>(context.blocking_end_ns, end);
  }
}

int64_t end_of(const Stream& stream) noexcept {
  return is_legacy(stream) ? std::max<int64_t>(stream.end_ns, stream.context->blocking_end_ns) : stream.end_ns.load();
}

}  // namespace oomdiag
