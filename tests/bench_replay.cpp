// By hand: how long and how much memory does the report of a trace with 10 million events take? Prints seconds and the peak
// of resident memory, with the trace itself (which a reader may map instead) counted apart. Bar: 2 s, 200 MiB.
//
//   cmake --build build --target oomdiag_bench_replay && build/bin/oomdiag_bench_replay [million events]

#include <fmt/format.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdlib>
#include <vector>

#include "profiler/report/json.h"
#include "profiler/report/make_report.h"

using namespace oomdiag;

namespace {

/// Training steps of a network with `kLayers` layers: two saved tensors and one temporary each in forward, two gradients
/// each in backward, as in a ResNet step by number and lifetime of blocks.
class TraceMaker {
 public:
  explicit TraceMaker(size_t events) : wanted_(events) {
    trace_.names = {"",
                    "aten::conv2d",
                    "aten::relu",
                    "ConvolutionBackward0",
                    "aten::convolution_backward",
                    "layer",
                    "train.py:1",
                    "Optimizer.step#Adam.step"};
    trace_.contexts = {{},
                       {.op = 1, .inner = 1, .module = 5, .source = 6, .flags = kGradMode},
                       {.op = 2, .inner = 2, .module = 5, .source = 6, .flags = kGradMode},
                       {.op = 4, .inner = 4, .node = 3}};
    trace_.devices = {{.name = "bench", .total_bytes = int64_t{80} << 30}};
    trace_.process.end_state = EndState::exited;
    trace_.events.reserve(events + 4096);  // so that it never moves, and its memory is what it needs
    for (uint64_t i = 0; i < 4 * kLayers + 64; ++i) {
      add(EventKind::segment_alloc, 0, kSegment * (i + 1), static_cast<int64_t>(kSegment));
    }
  }

  Trace make() {
    while (trace_.events.size() < wanted_) step();
    trace_.events.resize(wanted_);
    return std::move(trace_);
  }

 private:
  static constexpr uint64_t kLayers = 160;
  static constexpr uint64_t kSegment = uint64_t{20} << 20;

  void add(EventKind kind, uint32_t context, uint64_t address, int64_t bytes) {
    Event event{
        .address = address, .bytes = bytes, .context = context, .op_serial = serial_, .thread = 1, .kind = kind};
    event.sequence = trace_.events.size() + 1;
    event.time = event.sequence;
    if (context == 3) event.node_sequence = node_;
    if (context == 3) event.node_thread = 1;
    trace_.events.push_back(event);
  }
  void alloc(uint32_t context, uint64_t place, int64_t bytes) {
    add(EventKind::alloc, context, kSegment * place, bytes);
  }
  void free(uint32_t context, uint64_t place, int64_t bytes) {
    add(EventKind::free_requested, context, kSegment * place, bytes);
    add(EventKind::free_completed, context, kSegment * place, bytes);
  }
  void nodes(uint32_t context) {
    add(EventKind::nodes_created, context, 0, 1);
    trace_.events.back().node_sequence = node_++;
    trace_.events.back().node_thread = 1;
  }

  void step() {
    activation_bytes_ += 512;  // a peak at the very end is the worst case: the second pass goes all the way too
    for (uint64_t layer = 0; layer < kLayers; ++layer) {
      ++serial_;
      alloc(1, 1 + 2 * layer, activation_bytes_);
      alloc(1, 4 * kLayers + 1, 3 << 20);
      free(1, 4 * kLayers + 1, 3 << 20);
      nodes(1);
      ++serial_;
      alloc(2, 2 + 2 * layer, activation_bytes_);
      nodes(2);
    }
    add(EventKind::graph_begin, 3, 0, 0);
    const uint64_t newest = node_;
    for (uint64_t layer = kLayers; layer-- > 0;) {
      node_ = newest - 2 * (kLayers - layer);
      ++serial_;
      add(EventKind::saved_tensor, 3, kSegment * (2 + 2 * layer), activation_bytes_);
      alloc(3, 2 * kLayers + 1 + layer, 5 << 20);
      alloc(3, 3 * kLayers + 1 + layer, 2 << 20);
      free(3, 2 + 2 * layer, activation_bytes_);
      free(3, 1 + 2 * layer, activation_bytes_);
      free(3, 2 * kLayers + 1 + layer, 5 << 20);
    }
    node_ = newest;
    serial_ = 0;
    for (uint64_t layer = 0; layer < kLayers; ++layer) free(0, 3 * kLayers + 1 + layer, 2 << 20);
    add(EventKind::scope_begin, 0, 0, 0);
    trace_.events.back().detail = 7;
    add(EventKind::scope_end, 0, 0, 0);
    trace_.events.back().detail = 7;
  }

  size_t wanted_;
  Trace trace_;
  uint32_t serial_ = 0;
  uint64_t node_ = 0;
  int64_t activation_bytes_ = 9 << 20;
};

double peak_mebibytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

}  // namespace

int main(int argc, char** argv) {
  const size_t events = static_cast<size_t>(argc > 1 ? std::atoi(argv[1]) : 10) * 1'000'000;
  const Trace trace = TraceMaker(events).make();
  const double before = peak_mebibytes();
  const auto start = std::chrono::steady_clock::now();
  const Report report = make_report(trace, {.exit_code = 0});
  const std::string json = to_json(report);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("{} events: {:.2f} s; resident {:.0f} MiB at most, of them the trace {:.0f} MiB, the rest {:.0f} MiB\n",
             trace.events.size(), seconds.count(), peak_mebibytes(), before, peak_mebibytes() - before);
  fmt::print("peak {} bytes in step {}, {} steps, {} bytes of JSON\n", report.devices.at(0).peak.allocated_bytes,
             report.devices.at(0).peak.step, report.steps, json.size());
  return 0;
}
