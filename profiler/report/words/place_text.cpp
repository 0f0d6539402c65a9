#include "profiler/report/words/place_text.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/words/printable.h"
#include "profiler/report/words/text_options.h"

namespace oomdiag {
namespace {

template <class Place>
std::string describe(const Place& place, const TextOptions& options) {
  constexpr size_t kColumnsOfPart = 60;
  return joined_by_arrows(
      {place.node, place.op, place.module, short_source(place.inner_source), short_source(place.source)},
      options.unicode, kColumnsOfPart);
}

/// PyTorch's inline functions are compiled into the program itself.
bool is_torch_function(std::string_view name) {
  return name.starts_with("at::") || name.starts_with("c10::") || name.starts_with("torch::") || name == "_start";
}

}  // namespace

void add(std::string& text, std::string_view label, const std::string& value) {
  if (!value.empty()) text += fmt::format("  {:<9}  {}\n", label, value);
}

std::string moment_text(Phase phase, uint32_t step) {
  if (phase == Phase::setup && step == 0) return "before the first step";
  return fmt::format("in {}, step {}", name_of(phase), step);
}

std::string short_source(std::string_view source) { return std::string(source.substr(source.rfind('/') + 1)); }

std::string joined_by_arrows(const std::vector<std::string_view>& parts, bool unicode, size_t columns) {
  std::string text;
  for (const std::string_view part : parts) {
    if (!part.empty()) text += (text.empty() ? "" : unicode ? " ← " : " <- ") + printable(part, columns);
  }
  return text;
}

// A module is what people know; an op is the next best.
std::string_view label_of(const Where& where) {
  if (!where.module.empty()) return where.module;
  if (!where.op.empty()) return where.op;
  return !where.node.empty() ? where.node : where.source;
}

std::string_view label_of(const LiveBlock& block) { return block.name.empty() ? label_of(block.made) : block.name; }

std::string place_text(const ReportPeak& peak, const TextOptions& options) { return describe(peak, options); }
std::string place_text(const ReportFailure& failure, const TextOptions& options) { return describe(failure, options); }

bool is_in_library(std::string_view call) {
  return call.starts_with("torch/lib/") || call.starts_with("/lib") || call.starts_with("/usr/lib");
}

std::string callers_text(const ReportFailure& failure, const TextOptions& options) {
  constexpr size_t kMaxCallers = 4;
  std::vector<std::string> callers;
  for (const std::string& call : failure.stack) {
    const size_t in = call.find(" in ");
    const bool is_native = in != call.npos && call.substr(0, in).find("+0x") != call.npos;
    const bool is_library = in == call.npos || call.find("/lib/python3.") < in || call.starts_with("<frozen") ||
                            call.starts_with("site-packages/") || is_in_library(call);
    const bool is_said = !is_native && call.starts_with(failure.source + " in ");  // "where" ends with it
    if (is_library || is_said || (is_native && is_torch_function(std::string_view(call).substr(in + 4)))) continue;
    callers.push_back(printable(is_native ? call.substr(in + 4) : short_source(call), 100));
  }
  if (callers.empty()) return {};
  callers.resize(std::min(callers.size(), kMaxCallers));
  return "from " + joined_by_arrows({callers.begin(), callers.end()}, options.unicode);
}

}  // namespace oomdiag
