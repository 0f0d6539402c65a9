#include "profiler/report/device_reads.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

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
std::string describe(const DeviceRead& read, std::string_view at_least) {
  std::string text(read.op.empty() ? "a copy" : short_name(read.op));
  if (!read.source.empty()) text += fmt::format(" at {}", read.source.substr(read.source.rfind('/') + 1));
  if (read.count > 1) text += fmt::format(", {}{} times", at_least, read.count);
  return text;
}

std::vector<std::string> describe_all(std::vector<DeviceRead> reads, std::string_view at_least) {
  std::ranges::stable_sort(reads, std::ranges::greater(), &DeviceRead::count);
  std::vector<std::string> texts;
  for (const DeviceRead& read : reads) texts.push_back(describe(read, at_least));
  return texts;
}

void add_decisive(std::vector<DeviceRead> reads, std::string_view at_least, std::vector<std::string>& limits) {
  const auto texts = describe_all(std::move(reads), at_least);
  for (size_t i = 0; i < std::min(texts.size(), kMostPlaces); ++i) {
    limits.push_back(fmt::format("data-dependent: {}; peaks after it are a lower bound", texts[i]));
  }
  if (texts.size() > kMostPlaces) {
    limits.push_back(fmt::format("data-dependent: {} more places", texts.size() - kMostPlaces));
  }
}

void add_asked(std::vector<DeviceRead> reads, std::string_view at_least, std::vector<std::string>& limits) {
  auto texts = describe_all(std::move(reads), at_least);
  if (texts.empty()) return;
  const size_t more = texts.size() - std::min<size_t>(texts.size(), 3);
  texts.resize(texts.size() - more);
  limits.push_back(
      fmt::format("values that the card did not compute were read as zeros: {}{}; it matters only where the program "
                  "branches on them",
                  fmt::join(texts, "; "), more == 0 ? "" : fmt::format("; {} more places", more)));
}

}  // namespace

void add_reads(std::span<const DeviceRead> reads, bool all_counted, std::vector<std::string>& limits) {
  std::vector<DeviceRead> decisive, asked;
  for (const DeviceRead& read : reads) (asks_for_values(read.op) ? asked : decisive).push_back(read);
  const std::string_view at_least = all_counted ? "" : "at least ";
  add_decisive(std::move(decisive), at_least, limits);
  add_asked(std::move(asked), at_least, limits);
}

}  // namespace oomdiag
