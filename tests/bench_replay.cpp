// By hand: how long and how much memory do reports of traces with 10 million events take? A child writes the trace file, as
// the recorder would, another reads it. Prints seconds and the peak of resident memory of reading. Bar: 2 s, 200 MiB, for
// each of these programs:
//
//   training   steps of 2 000 events: forward on one thread, backward on another
//   huge       three steps, of very many micro-batches each
//   serving    no steps: calls of a model of 160 layers without gradients, a new batch for each
//   tiny       no steps: calls of a single layer, nothing between them
//
//   cmake --build build --target oomdiag_bench_replay && build/bin/oomdiag_bench_replay [million events [program]]

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <semaphore>
#include <string_view>
#include <thread>

#include "profiler/report/json/json.h"
#include "profiler/report/make/make_report.h"
#include "profiler/trace/writer.h"

using namespace oomdiag;

namespace {

/// Writes events on a thread of its own.
class BackwardThread {
 public:
  explicit BackwardThread(TraceWriter& writer)
      : thread_([this, &writer] {
          for (begin_.acquire(); events_ != nullptr; begin_.acquire()) {
            for (Event& event : *events_) writer.write(event);
            done_.release();
          }
        }) {}
  ~BackwardThread() {
    events_ = nullptr;
    begin_.release();
    thread_.join();
  }
  void write(std::vector<Event>& events) {
    events_ = &events;
    begin_.release();
    done_.acquire();
  }

 private:
  std::vector<Event>* events_ = nullptr;
  std::binary_semaphore begin_{0}, done_{0};
  std::thread thread_;
};

/// Training steps of a network with `kLayers` layers: two saved tensors and one temporary each in forward, two gradients
/// each in backward, as in a ResNet step by number and lifetime of blocks.
class TraceMaker {
 public:
  TraceMaker(TraceWriter& writer, size_t events) : writer_(writer), backward_(writer), total_(events) {
    for (const char* name : {"aten::conv2d", "aten::relu", "ConvolutionBackward0", "aten::convolution_backward",
                             "layer", "train.py:1", "Optimizer.step#Adam.step", "aten::randn", "first"}) {
      writer.intern(std::string_view(name));
    }
    writer.intern(Context{.op = 1, .inner = 1, .module = 5, .source = 6, .flags = kGradMode});
    writer.intern(Context{.op = 2, .inner = 2, .module = 5, .source = 6, .flags = kGradMode});
    writer.intern(Context{.op = 4, .inner = 4, .node = 3});
    writer.intern(Context{.op = 8, .inner = 8, .source = 6});
    writer.intern(Context{.op = 1, .inner = 1, .module = 9, .source = 6});
    writer.intern(Context{.op = 2, .inner = 2, .module = 5, .source = 6});
    writer.header().devices[0].total_bytes = int64_t{80} << 30;
    writer.header().python = 1;
    for (uint64_t i = 0; i < 4 * kLayers + 64; ++i) {
      add({.address = kSegment * (i + 1), .bytes = static_cast<int64_t>(kSegment), .kind = EventKind::segment_alloc});
    }
  }

  void make(std::string_view program) {
    while (written_ < total_) {
      if (program == "training") step();
      if (program == "huge") huge_step();
      if (program == "serving") serve(kLayers, true);
      if (program == "tiny") serve(1, false);
    }
    flush();
  }

 private:
  static constexpr uint64_t kLayers = 160;
  static constexpr uint32_t kBackward = 3;  // context
  static constexpr uint64_t kSegment = uint64_t{20} << 20;

  void add(Event event) {
    event.time = ++written_;
    event.call_id = call_id_;
    event.thread = 1;
    if (event.context == kBackward) {
      event.thread = 2;
      event.node_sequence = node_;
      event.node_thread = 1;
      return batch_.push_back(event);
    }
    flush();
    writer_.write(event);
  }
  void flush() {
    if (!batch_.empty()) backward_.write(batch_);
    batch_.clear();
  }
  void alloc(uint32_t context, uint64_t place, int64_t bytes) {
    add({.address = kSegment * place, .bytes = bytes, .context = context, .kind = EventKind::alloc});
  }
  void free(uint32_t context, uint64_t place, int64_t bytes) {
    add({.address = kSegment * place,
         .bytes = bytes,
         .context = context,
         .kind = EventKind::free_requested,
         .flags = kFreeCompleted});
  }
  void nodes(uint32_t context) {
    add({.bytes = 1, .node_sequence = node_++, .context = context, .node_thread = 1, .kind = EventKind::nodes_created});
  }

  void step() {
    micro_batch();
    optimizer();
  }

  void huge_step() {
    for (const size_t end = written_ + total_ / 3; written_ < end;) micro_batch();
    optimizer();
  }

  // The result of the call before lives until this one has its own.
  void serve(uint64_t layers, bool new_batch) {
    call_ ^= 1;
    if (new_batch) {
      call_id_ = ++ops_;
      alloc(4, 1, 4 << 20);
    }
    for (uint64_t layer = 0; layer < layers; ++layer) {
      call_id_ = ++ops_;
      const uint64_t place = layer + 1 == layers ? 4 * kLayers + 2 + call_ : 2 + layer;
      alloc(layer == 0 ? 5 : 6, place, 8 << 20);
      if (layer > 0) free(6, 1 + layer, 8 << 20);
    }
    call_id_ = 0;
    if (served_) free(6, 4 * kLayers + 2 + (call_ ^ 1), 8 << 20);
    if (new_batch) free(0, 1, 4 << 20);
    served_ = true;
  }

  void micro_batch() {
    activation_bytes_ += 512;  // a higher peak in each step is the worst case: each takes the place of the one before
    for (uint64_t layer = 0; layer < kLayers; ++layer) {
      ++call_id_;
      alloc(1, 1 + 2 * layer, activation_bytes_);
      alloc(1, 4 * kLayers + 1, 3 << 20);
      free(1, 4 * kLayers + 1, 3 << 20);
      nodes(1);
      ++call_id_;
      alloc(2, 2 + 2 * layer, activation_bytes_);
      nodes(2);
    }
    add({.context = kBackward, .kind = EventKind::graph_begin});
    const uint64_t newest = node_;
    for (uint64_t layer = kLayers; layer-- > 0;) {
      node_ = newest - 2 * (kLayers - layer);
      ++call_id_;
      add({.address = kSegment * (2 + 2 * layer),
           .bytes = activation_bytes_,
           .context = kBackward,
           .kind = EventKind::saved_tensor});
      alloc(kBackward, 2 * kLayers + 1 + layer, 5 << 20);
      alloc(kBackward, 3 * kLayers + 1 + layer, 2 << 20);
      free(kBackward, 2 + 2 * layer, activation_bytes_);
      free(kBackward, 1 + 2 * layer, activation_bytes_);
      free(kBackward, 2 * kLayers + 1 + layer, 5 << 20);
    }
    node_ = newest;
    call_id_ = 0;
    for (uint64_t layer = 0; layer < kLayers; ++layer) free(0, 3 * kLayers + 1 + layer, 2 << 20);
  }

  void optimizer() {
    add({.detail = 7, .kind = EventKind::scope_begin});
    add({.detail = 7, .kind = EventKind::scope_end});
  }

  TraceWriter& writer_;
  BackwardThread backward_;
  std::vector<Event> batch_;
  size_t total_, written_ = 0;
  uint32_t call_id_ = 0;
  uint64_t node_ = 0;
  int64_t activation_bytes_ = 9 << 20;
  uint64_t call_ = 0;
  uint32_t ops_ = 0;
  bool served_ = false;
};

void write_trace(const std::filesystem::path& file, size_t events, std::string_view program) {
  const TraceBudget budget{.event_bytes = static_cast<int64_t>(events * sizeof(Event) * 5 / 4) + (16 << 20)};
  TraceWriter writer(file, 1, budget);
  TraceMaker(writer, events).make(program);
  writer.publish();
  writer.finish();
}

double peak_mebibytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

/// CPU time of this process, which other programs disturb less than the clock.
double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void read_back(const std::filesystem::path& file, std::string_view program) {
  const auto start = std::chrono::steady_clock::now();
  const Trace trace = read_trace(file);
  const double cpu_read = cpu_seconds();
  const Report report = make_report(trace, {.exit_code = 0});
  const std::string json = to_json(report);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("{:<9} {} events: {:.2f} s, {:.2f} s of CPU, of them {:.2f} s to read; resident {:.0f} MiB at most\n",
             program, trace.events.size(), seconds.count(), cpu_seconds(), cpu_read, peak_mebibytes());
  fmt::print("          peak {} bytes in step {}, {} steps, {} bytes of JSON\n",
             report.devices.at(0).peak.allocated_bytes, report.devices.at(0).peak.step, report.steps, json.size());
}

/// In a process of its own, so that its memory and time are its own.
template <class Work>
void in_child(Work work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
}

}  // namespace

int main(int argc, char** argv) {
  const size_t events = static_cast<size_t>(argc > 1 ? std::atoi(argv[1]) : 10) * 1'000'000;
  const std::string_view only = argc > 2 ? argv[2] : "";
  for (const std::string_view program : {"training", "huge", "serving", "tiny"}) {
    if (!only.empty() && program != only) continue;
    const std::filesystem::path file = fmt::format("bench-trace-{}", getpid());
    in_child([&] { write_trace(file, events, program); });
    in_child([&] { read_back(file, program); });
    std::filesystem::remove(file);
  }
  return 0;
}
