#pragma once

#include "tests/event_builder.h"
#include "tests/profiler/snapshot/pickle_writer.h"

// The parts of a snapshot, as Python pickles them.
namespace oomdiag {

inline constexpr int64_t kAddress = 0x7f0000000000;

inline std::string frame(const std::string& name, const std::string& file, int64_t line) {
  return dict({{"name", text(name)}, {"filename", text(file)}, {"line", integer(line)}});
}

inline std::string stack() {
  return list({frame("conv2d", "/usr/lib/python3/dist-packages/torch/nn/functional.py", 10),
               frame("forward", "/home/me/train.py", 31), frame("main", "/home/me/main.py", 7)});
}

inline std::string entry(const std::string& action, int64_t address, int64_t bytes, const std::string& frames = {},
                         int64_t time_us = 1000) {
  std::vector<std::pair<std::string, std::string>> items = {
      {"action", text(action)},      {action == "oom" ? "device_free" : "addr", integer(address)},
      {"size", integer(bytes)},      {"stream", integer(0)},
      {"time_us", integer(time_us)}, {"compile_context", text("N/A")}};
  if (!frames.empty()) items.emplace_back("frames", frames);
  return dict(items);
}

inline std::string block(int64_t bytes, int64_t requested, const std::string& state, const std::string& frames = {}) {
  std::vector<std::pair<std::string, std::string>> items = {
      {"size", integer(bytes)}, {"requested_size", integer(requested)}, {"state", text(state)}};
  if (!frames.empty()) items.emplace_back("frames", frames);
  return dict(items);
}

inline std::string segment(int64_t address, int64_t bytes, const std::vector<std::string>& blocks) {
  return dict({{"device", integer(0)},
               {"address", integer(address)},
               {"total_size", integer(bytes)},
               {"stream", integer(0)},
               {"segment_type", text("large")},
               {"is_expandable", "\x89"},
               {"segment_pool_id", integer(0) + integer(0) + "\x86"},
               {"blocks", list(blocks)}});
}

/// `annotations`: those of external_annotations.
inline std::string snapshot(const std::vector<std::string>& segments, const std::vector<std::string>& entries,
                            const std::vector<std::string>& annotations = {}) {
  return PickleWriter()
      .dict({{"segments", list(segments)},
             {"device_traces", list({list(entries)})},
             {"allocator_settings", dict({{"PYTORCH_CUDA_ALLOC_CONF", text("max_split_size_mb:64")},
                                          {"garbage_collection_threshold", std::string("G\0\0\0\0\0\0\0\0", 9)},
                                          {"roundup_power2_divisions", dict({{"1", integer(0)}})}})},
             {"external_annotations", list(annotations)}})
      .stop();
}

}  // namespace oomdiag
