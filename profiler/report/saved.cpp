#include "profiler/report/saved.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "profiler/replay/join.h"
#include "profiler/report/card_report.h"

namespace oomdiag {
namespace {

using Storage = std::pair<uint8_t, uint64_t>;  // device, address

// The index after its graph_begin; 0 if no graph was walked.
uint64_t find_last_walk(const EventLog& events) {
  uint64_t after = 0;
  for (auto at = events.begin(); at != events.end(); ++at) {
    if (at->kind == EventKind::graph_begin) after = at.index() + 1;
  }
  return after;
}

ReportSavedTensor describe(const Trace& trace, const Event& event) {
  const std::string_view shape = trace.name(event.detail);
  return {.bytes = event.bytes, .shape = parse_shape(shape), .dtype = std::string(parse_dtype(shape))};
}

}  // namespace

std::vector<ReportSavedTensor> list_last_walk(const Trace& trace) {
  const uint64_t begin = find_last_walk(trace.events);
  NodeTable nodes;
  std::map<Storage, Event> makers;
  for (const Event& event : trace.events.first(begin)) {
    if (event.kind == EventKind::nodes_created) nodes.add(event);
    if (event.kind == EventKind::alloc) makers[{event.device, event.address}] = event;
  }
  std::set<Storage> parameters;
  std::map<Storage, ReportSavedTensor> saved;
  for (auto at = trace.events.from(begin); at != trace.events.end(); ++at) {
    const Event& event = *at;
    const Storage storage{event.device, event.address};
    if (event.kind == EventKind::parameter) parameters.insert(storage);
    if (event.kind != EventKind::saved_tensor) continue;
    const auto [entry, fresh] = saved.try_emplace(storage, describe(trace, event));
    const Where saver = locate(trace, nodes, event);
    entry->second.saved_by.emplace_back(saver.node);
    entry->second.saved_by_modules.emplace_back(saver.module);
    const auto maker = makers.find(storage);
    if (!fresh || maker == makers.end()) continue;
    const Where made = locate(trace, nodes, maker->second);
    entry->second.made_by = made.op;
    entry->second.module = made.module;
    entry->second.source = made.source;
  }
  std::vector<ReportSavedTensor> result;
  for (auto& [storage, tensor] : saved) {
    if (!parameters.contains(storage)) result.push_back(std::move(tensor));
  }
  std::stable_sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  return result;
}

std::string label_of(const ReportSavedTensor& tensor) {
  std::string label = !tensor.module.empty() ? tensor.module : !tensor.made_by.empty() ? tensor.made_by : "?";
  for (size_t i = 0; i < tensor.saved_by.size(); ++i) {
    const bool in_module = i < tensor.saved_by_modules.size() && !tensor.saved_by_modules[i].empty();
    const std::string& by = in_module ? tensor.saved_by_modules[i] : tensor.saved_by[i];
    if (by == label) continue;
    label += " → " + by;
    break;
  }
  return fmt::format("{}  [{}] {}", label, fmt::join(tensor.shape, ", "), tensor.dtype);
}

}  // namespace oomdiag
