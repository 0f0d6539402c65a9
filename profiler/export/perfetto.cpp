#include "profiler/export/perfetto.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "profiler/event.h"
#include "profiler/export/picture.h"
#include "profiler/replay/evidence/join.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/words/json_text.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxEvents = 1 << 20;  // of the trace: more make a file that no browser opens

double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

/// Writes the events of a process as text one after the other: all of them as JSON would take much memory.
class PerfettoWriter {
 public:
  /// `begin_ns`: when the process began, on the timeline.
  PerfettoWriter(int process, int64_t begin_ns, std::string& text)
      : process_(process), begin_ns_(begin_ns), text_(text) {}

  /// `event` as in the format, without its process.
  void add(Json event) {
    event["pid"] = process_;
    if (!text_.empty()) text_ += ",\n";
    text_ += json_text(event);
  }
  /// Such an event at a time of the process.
  void add_at(int64_t time_ns, Json event) {
    event["ts"] = microseconds(begin_ns_ + time_ns);
    add(std::move(event));
  }
  void slice(std::string_view name, const char* kind, uint16_t thread, int64_t begin_ns, int64_t end_ns,
             int64_t bytes) {
    add_at(begin_ns, {{"name", name},
                      {"cat", kind},
                      {"ph", "X"},
                      {"dur", microseconds(std::max<int64_t>(end_ns - begin_ns, 1))},
                      {"tid", thread},
                      {"args", {{"allocated_bytes", bytes}}}});
  }

 private:
  int process_;
  int64_t begin_ns_;
  std::string& text_;
};

/// What follows each other on a thread under one name is one slice.
class Slices {
 public:
  Slices(PerfettoWriter& writer, const char* kind) : writer_(writer), kind_(kind) {}

  void see(uint16_t thread, std::string_view name, uint64_t identity, int64_t time_ns, int64_t bytes) {
    Open& open = open_[thread];
    if (open.identity != identity || open.name != name) {
      close(thread, open, time_ns);
      open = {name, identity, time_ns, time_ns, 0};
    }
    open.end_ns = time_ns;
    open.bytes += bytes;
  }
  void finish() {
    for (auto& [thread, open] : open_) close(thread, open, open.end_ns);
  }

 private:
  struct Open {
    std::string_view name{};
    uint64_t identity = 0;
    int64_t begin_ns = 0, end_ns = 0, bytes = 0;
  };
  void close(uint16_t thread, const Open& open, int64_t next_ns) {
    if (!open.name.empty()) {
      writer_.slice(open.name, kind_, thread, open.begin_ns, std::min(next_ns, open.end_ns + 1), open.bytes);
    }
  }

  PerfettoWriter& writer_;
  const char* kind_;
  std::map<uint16_t, Open> open_;
};

void add_counters(const Report& report, PerfettoWriter& writer) {
  for (const ReportOfDevice& device : report.devices) {
    const std::string name = fmt::format("GPU {}", device.device.index);
    for (const ReportPoint& point : device.timeline) {
      writer.add_at(point.time_ns,
                    {{"name", name},
                     {"ph", "C"},
                     {"args",
                      {{"allocated", point.allocated_bytes},
                       {"cached", std::max<int64_t>(0, point.reserved_bytes - point.allocated_bytes)}}}});
    }
    for (const Mark& mark : device.marks) {
      writer.add_at(mark.time_ns, {{"name", mark.name}, {"ph", "i"}, {"s", "p"}, {"tid", 0}});
    }
    if (!device.failure) continue;
    writer.add_at(device.failure->time_ns, {{"name", "out of memory"},
                                            {"ph", "i"},
                                            {"s", "p"},
                                            {"tid", 0},
                                            {"args", {{"requested_bytes", device.failure->requested_bytes}}}});
  }
}

/// Who held each GPU during the step that the report describes.
void add_categories(const Trace& trace, const History& history, PerfettoWriter& writer) {
  for (const DeviceHistory& device : history.devices) {
    const std::string name = fmt::format("GPU {} step {}", device.index, device.step_allocations.step);
    const std::vector<BandPoint> points = draw_step(device.step_allocations).points;
    const auto is_held = [&](size_t c) {
      return std::any_of(points.begin(), points.end(), [&](const BandPoint& point) { return point.bytes[c] != 0; });
    };
    std::vector<size_t> categories;
    for (size_t c = 0; c < kCategoryCount; ++c) {
      if (is_held(c)) categories.push_back(c);
    }
    for (const BandPoint& point : points) {
      Json held;
      for (const size_t c : categories) held[std::string(name_of(static_cast<Category>(c)))] = point.bytes[c];
      const int64_t time = trace.time_ns(trace.events[point.event]);
      writer.add_at(time, {{"name", name}, {"ph", "C"}, {"args", held}});
    }
  }
}

void add_slices(const Trace& trace, PerfettoWriter& writer) {
  Slices modules(writer, "module"), ops(writer, "op");
  NodeTable nodes;
  std::map<uint16_t, std::vector<std::pair<uint64_t, int64_t>>> scopes;  // by thread: name, begin
  const uint64_t first = trace.events.size() > kMaxEvents ? trace.events.size() - kMaxEvents : 0;
  for (auto at = trace.events.from(first); at != trace.events.end(); ++at) {
    const Event& event = *at;
    const int64_t time = trace.time_ns(event);
    if (event.kind == EventKind::nodes_created) nodes.add(event);
    if (event.kind == EventKind::scope_begin) scopes[event.thread].emplace_back(event.detail, time);
    if (event.kind == EventKind::scope_end && !scopes[event.thread].empty()) {
      const auto [name, begin] = scopes[event.thread].back();
      scopes[event.thread].pop_back();
      writer.slice(trace.name(name), "scope", event.thread, begin, time, 0);
    }
    if (event.kind != EventKind::alloc && event.kind != EventKind::free_requested) continue;
    const Where where = locate(trace, nodes, event);
    const int64_t bytes = event.kind == EventKind::alloc ? event.bytes : 0;
    const std::string_view op = where.node.empty() ? where.op : where.node;
    modules.see(event.thread, where.module, 0, time, bytes);
    ops.see(event.thread, op, event.call_id, time, bytes);
  }
  modules.finish();
  ops.finish();
}

}  // namespace

void PerfettoTimeline::add(const Report& report, const Trace* trace, const History& history) {
  int process = 0;
  int64_t begin_ns = 0;
  if (trace != nullptr) {
    if (events_.empty()) begin_ns_ = trace->process.start_time_ns;
    process = trace->process.pid;
    begin_ns = static_cast<int64_t>(trace->process.start_time_ns - begin_ns_);
  }
  if (process == 0) process = report.rank + 1;  // of a snapshot; readers of the format take 0 for the system's own
  PerfettoWriter writer(process, begin_ns, events_);
  const std::string name = report.world_size > 1 ? fmt::format("rank {}", report.rank) : "program";
  writer.add({{"name", "process_name"}, {"ph", "M"}, {"args", {{"name", name}}}});
  writer.add({{"name", "process_sort_index"}, {"ph", "M"}, {"args", {{"sort_index", report.rank}}}});
  add_counters(report, writer);
  if (trace != nullptr) {
    add_categories(*trace, history, writer);
    add_slices(*trace, writer);
  }
}

std::string PerfettoTimeline::finish() && {
  return "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n" + std::move(events_) + "\n]}\n";
}

}  // namespace oomdiag
