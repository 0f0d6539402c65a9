#include "profiler/report/device_reads.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string_view>

// Kernels do nothing on a virtual card, so what they should have written reads as zeros. Whether that matters depends on
// who reads:
//
//   the program asks for the values    loss.item(), x.cpu(), x.tolist()    it may only print them: said once, softly
//   an op reads of its own accord      nonzero, unique, x[mask], `if x:`    it needs a size or decides on a branch: from
//                                                                          there on shapes may differ from a real run's
//
// The ops of the first row are listed; all others belong to the second.

namespace oomdiag {
namespace {

constexpr size_t kMostPlaces = 5;

struct Place {
  std::string_view op;
  std::string_view source;

  auto operator<=>(const Place&) const = default;
};
using Counts = std::map<Place, int64_t>;

bool asks_for_values(std::string_view op) {
  constexpr std::string_view kAsking[] = {"",
                                          "aten::item",
                                          "aten::_local_scalar_dense",
                                          "aten::to",
                                          "aten::_to_copy",
                                          "aten::cpu",
                                          "aten::copy_",
                                          "aten::clone",
                                          "aten::_to_cpu",
                                          "aten::_copy_from"};
  return std::find(std::begin(kAsking), std::end(kAsking), op) != std::end(kAsking);
}

std::string_view short_name(std::string_view op) {
  const size_t colons = op.rfind("::");
  return colons == op.npos ? op : op.substr(colons + 2);
}

/// "nonzero at train.py:88, 12 times"
std::string describe(const Place& place, int64_t count, std::string_view at_least) {
  std::string text(place.op.empty() ? "a copy" : short_name(place.op));
  if (!place.source.empty()) text += fmt::format(" at {}", place.source.substr(place.source.rfind('/') + 1));
  if (count > 1) text += fmt::format(", {}{} times", at_least, count);
  return text;
}

/// The most frequent first.
std::vector<std::string> describe_all(const Counts& counts, std::string_view at_least) {
  std::vector<std::pair<Place, int64_t>> sorted(counts.begin(), counts.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<std::string> texts;
  for (const auto& [place, count] : sorted) texts.push_back(describe(place, count, at_least));
  return texts;
}

void add_decisive(const Counts& counts, std::string_view at_least, std::vector<std::string>& limits) {
  const auto texts = describe_all(counts, at_least);
  for (size_t i = 0; i < std::min(texts.size(), kMostPlaces); ++i) {
    limits.push_back(fmt::format("data-dependent: {}; peaks after it are a lower bound", texts[i]));
  }
  if (texts.size() > kMostPlaces) {
    limits.push_back(fmt::format("data-dependent: {} more places", texts.size() - kMostPlaces));
  }
}

void add_asked(const Counts& counts, std::string_view at_least, std::vector<std::string>& limits) {
  auto texts = describe_all(counts, at_least);
  if (texts.empty()) return;
  const size_t more = texts.size() - std::min<size_t>(texts.size(), 3);
  texts.resize(texts.size() - more);
  limits.push_back(
      fmt::format("values that the card did not compute were read as zeros: {}{}; it matters only where the program "
                  "branches on them",
                  fmt::join(texts, "; "), more == 0 ? "" : fmt::format("; {} more places", more)));
}

}  // namespace

void add_reads(const Trace& trace, std::vector<std::string>& limits) {
  Counts decisive;
  Counts asked;
  for (const Event& event : trace.events) {
    if (event.kind != EventKind::note || (event.flags & kNoteRead) == 0) continue;
    const Context& context = trace.context(event.context);
    const std::string_view op = trace.name(context.op != 0 ? context.op : context.node);
    ++(asks_for_values(op) ? asked : decisive)[{op, trace.name(context.source)}];
  }
  // Reads of steady steps are not counted one by one, and those of the oldest steps may be overwritten.
  const bool is_complete = trace.process.steady_steps == 0 && trace.overwritten_events == 0;
  const std::string_view at_least = is_complete ? "" : "at least ";
  add_decisive(decisive, at_least, limits);
  add_asked(asked, at_least, limits);
}

}  // namespace oomdiag
