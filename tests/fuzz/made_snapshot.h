#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <string>
#include <string_view>

#include "tests/profiler/snapshot/snapshot_writer.h"

// A snapshot whose structure makes sense and whose values need not: what flipping bytes of a pickle seldom reaches.
namespace oomdiag {

class SnapshotMaker {
 public:
  explicit SnapshotMaker(std::string_view bytes)
      : from_(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()) {}

  std::string make() {
    std::vector<std::string> segments, traces, annotations;
    for (int i = small(4); i > 0; --i) segments.push_back(some_segment());
    for (int i = small(3); i > 0; --i) traces.push_back(some_trace());
    for (int i = small(4); i > 0; --i) {
      annotations.push_back(
          dict({{"name", text(from_.PickValueInArray({"Optimizer.step#SGD.step", "ProfilerStep#1", "x"}))},
                {"time_us", integer(time())},
                {"stage", text(from_.ConsumeBool() ? "END" : "START")}}));
    }
    return PickleWriter()
        .dict({{"segments", list(segments)},
               {"device_traces", list(traces)},
               {"allocator_settings", dict({{"PYTORCH_CUDA_ALLOC_CONF", text(from_.ConsumeRandomLengthString(24))}})},
               {"external_annotations", list(annotations)}})
        .stop();
  }

 private:
  int small(int most) { return from_.ConsumeIntegralInRange(0, most); }
  int64_t address() {
    return from_.ConsumeBool() ? kAddress + from_.ConsumeIntegralInRange<int64_t>(0, 64) * 1_MiB
                               : from_.ConsumeIntegral<int64_t>();
  }
  int64_t bytes() {
    return from_.ConsumeBool() ? from_.ConsumeIntegralInRange<int64_t>(0, 64) * 512 : from_.ConsumeIntegral<int64_t>();
  }
  int64_t time() {
    return from_.ConsumeBool() ? from_.ConsumeIntegralInRange<int64_t>(0, 5000) : from_.ConsumeIntegral<int64_t>();
  }
  std::string frames() {
    static const std::string optimizer =
        list({frame("step", "/x/torch/optim/sgd.py", 3), frame("main", "/me/train.py", 9)});
    static const std::string engine = list({frame("torch::autograd::Engine::thread_main()", "??", 0)});
    switch (small(4)) {
      case 0:
        return stack();
      case 1:
        return optimizer;
      case 2:
        return engine;
      case 3:
        return list({frame(from_.ConsumeRandomLengthString(16), from_.ConsumeRandomLengthString(16), address())});
      default:
        return {};
    }
  }
  std::string some_trace() {
    std::vector<std::string> entries;
    for (int i = small(12); i > 0; --i) {
      const char* const action =
          from_.PickValueInArray({"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
                                  "segment_map", "segment_unmap", "oom", "snapshot"});
      entries.push_back(entry(action, address(), bytes(), frames(), time()));
    }
    return list(entries);
  }
  std::string some_segment() {
    std::vector<std::string> blocks;
    for (int i = small(5); i > 0; --i) {
      const char* const state = from_.PickValueInArray({"active_allocated", "active_pending_free", "inactive"});
      blocks.push_back(block(bytes(), bytes(), state, frames()));
    }
    return dict({{"device", integer(small(9) == 9 ? address() : small(2))},
                 {"address", integer(address())},
                 {"total_size", integer(bytes())},
                 {"stream", integer(small(2))},
                 {"segment_type", text(from_.ConsumeBool() ? "large" : "small")},
                 {"is_expandable", from_.ConsumeBool() ? "\x88" : "\x89"},
                 {"blocks", list(blocks)}});
  }

  FuzzedDataProvider from_;
};

inline std::string make_snapshot(std::string_view bytes) { return SnapshotMaker(bytes).make(); }

}  // namespace oomdiag
