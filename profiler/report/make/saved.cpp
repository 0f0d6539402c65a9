#include "profiler/report/make/saved.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "profiler/explain/words/shape.h"
#include "profiler/replay/allocations/memory_state.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
std::vector<ReportSavedTensor> list_last_walk(const Trace& trace) {
  std::vector<ReportSavedTensor> result;
  for (const LiveBlock& block : read_last_walk(trace)) {
    if (block.category != Category::parameter) result.push_back(report_saved(block));
  }
  std::stable_sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  return result;
}

ReportSavedTensor report_saved(const LiveBlock& block) {
  ReportSavedTensor saved{.bytes = block.bytes,
                          .shape = parse_shape(block.shape),
                          .dtype = std::string(parse_dtype(block.shape)),
                          .made_by = std::string(block.made.op),
                          .module = std::string(block.made.module),
                          .source = std::string(block.made.source)};
  for (const Where& saver : block.saved_by) {
    saved.saved_by.emplace_back(saver.node);
    saved.saved_by_modules.emplace_back(saver.module);
  }
  return saved;
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
