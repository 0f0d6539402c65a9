#include "profiler/snapshot/timeline.h"

#include <fmt/format.h>

#include <istream>

#include "profiler/error.h"
#include "profiler/snapshot/packed.h"
#include "profiler/snapshot/timeline_reader.h"

// A Chrome trace is an object of events, most of which are not of memory:
//
//   {"traceEvents": [{"name": "[memory]", "ts": 1.5, "args": {"Device Type": 1, "Device Id": 0, "Total Allocated": …}}]}

namespace oomdiag {
namespace {

class ChromeReader : public TimelineReader {
 public:
  const char* format() const override { return "a Chrome trace"; }
  const char* hint() const override {
    return "record it with torch.profiler.profile(profile_memory=True), or give a snapshot.pickle of PyTorch";
  }
  MemoryTimeline finish() override {
    if (timeline_.gpus.empty()) reject(" without \"[memory]\" events of a GPU");
    return std::move(timeline_);
  }

  bool key(string_t& name) override {
    key_.assign(name, 0, kMaxKey);
    return true;
  }
  bool string(string_t& text) override {
    if (depth_ == kEventDepth && key_ == "name") event_.is_memory = text == "[memory]";
    return true;
  }
  bool start_object(size_t) override {
    if (++depth_ == kEventDepth) event_ = {};
    return true;
  }
  bool end_object() override {
    if (depth_-- == kEventDepth) take_event();
    return true;
  }
  bool start_array(size_t) override { return ++depth_ > 0; }
  bool end_array() override { return depth_-- > 0; }

 private:
  static constexpr int kCuda = 1;           // c10::DeviceType
  static constexpr size_t kEventDepth = 3;  // of an event's object; its "args" are one deeper
  static constexpr size_t kMaxKey = 32;
  struct MemoryEvent {
    bool is_memory = false;
    double time_us = 0, allocated_bytes = -1, reserved_bytes = 0, type = -1, gpu = -1;
  };

  bool number(double value) override {
    if (depth_ == kEventDepth && key_ == "ts") event_.time_us = value;
    if (depth_ != kEventDepth + 1) return true;
    if (key_ == "Total Allocated") event_.allocated_bytes = value;
    if (key_ == "Total Reserved") event_.reserved_bytes = value;
    if (key_ == "Device Type") event_.type = value;
    if (key_ == "Device Id") event_.gpu = value;
    return true;
  }

  void take_event() {
    if (!event_.is_memory || event_.type != kCuda || !(event_.allocated_bytes >= 0)) return;
    if (!(event_.gpu >= 0 && event_.gpu < 256)) return;
    TimelineOfGpu& gpu = timeline_.gpus[static_cast<int>(event_.gpu)];
    note(gpu, event_.time_us, whole(event_.allocated_bytes));
    gpu.peak_reserved_bytes = std::max(gpu.peak_reserved_bytes, whole(event_.reserved_bytes));
  }

  MemoryTimeline timeline_;
  size_t depth_ = 0;
  std::string key_;
  MemoryEvent event_;
};

}  // namespace

MemoryTimeline read_timeline(const std::filesystem::path& file) {
  UnpackedStream characters(file);
  std::istream stream(&characters);
  const bool is_list = (stream >> std::ws).peek() == '[';
  const std::unique_ptr<TimelineReader> reader = is_list ? make_list_reader() : std::make_unique<ChromeReader>();
  MemoryTimeline timeline;
  if (nlohmann::json::sax_parse(stream, reader.get())) timeline = reader->finish();
  const std::string wrong = characters.is_damaged() ? kDamagedTimeline : reader->what_is_wrong();
  if (wrong.empty()) return timeline;
  throw Error(ErrorKind::input, fmt::format("'{}' is {}{}", file.string(), reader->format(), wrong), reader->hint());
}

}  // namespace oomdiag
