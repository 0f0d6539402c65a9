#include "profiler/report/make/device_reads.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

#include "profiler/replay/history.h"
#include "profiler/report/words/place_text.h"

// Kernels do nothing on a virtual GPU, so what they should have written reads as zeros. Whether that matters depends on
// who reads:
//
//   the program asks for the values    loss.item(), x.cpu(), x.tolist()    it may print them or branch on them: one quiet
//   the program branches               if x:, torch.equal(a, b)            line for both
//   an op wants a size                 nonzero, unique, x[mask]            from there on shapes may be smaller than in a
//                                                                          real run: peaks are a lower bound
//
// The ops of the first two rows are listed; all others belong to the third.

namespace oomdiag {
namespace {

constexpr size_t kMaxPlaces = 5;

bool wants_no_size(std::string_view op) {
  constexpr std::string_view kAsking[] = {"",
                                          "aten::item",
                                          "aten::_local_scalar_dense",
                                          "aten::to",
                                          "aten::_to_copy",
                                          "aten::cpu",
                                          "aten::copy_",
                                          "aten::clone",
                                          "aten::_to_cpu",
                                          "aten::_copy_from",
                                          "aten::is_nonzero",
                                          "aten::equal",
                                          "aten::allclose"};
  return std::find(std::begin(kAsking), std::end(kAsking), op) != std::end(kAsking);
}

std::string_view short_name(std::string_view op) {
  const size_t colons = op.rfind("::");
  return colons == op.npos ? op : op.substr(colons + 2);
}

/// "nonzero at train.py:88, 12 times"
std::string describe(const DeviceRead& read, std::string_view at_least) {
  std::string text(read.op.empty() ? "a copy" : short_name(read.op));
  if (!read.source.empty()) text += fmt::format(" at {}", short_source(read.source));
  if (read.count > 1) text += fmt::format(", {}{} times", at_least, read.count);
  return text;
}

std::vector<std::string> describe_all(std::vector<DeviceRead> reads, std::string_view at_least) {
  std::ranges::stable_sort(reads, std::ranges::greater(), &DeviceRead::count);
  std::vector<std::string> texts;
  for (const DeviceRead& read : reads) texts.push_back(describe(read, at_least));
  return texts;
}

void add_sizes(std::vector<DeviceRead> reads, std::string_view at_least, std::vector<std::string>& limitations) {
  const auto texts = describe_all(std::move(reads), at_least);
  if (texts.empty()) return;
  const size_t shown = std::min(texts.size(), kMaxPlaces);
  const std::string more = texts.size() == shown ? "" : fmt::format("; {} more places", texts.size() - shown);
  limitations.push_back(fmt::format("data-dependent sizes, so that peaks after them are a lower bound: {}{}",
                                    fmt::join(texts.begin(), texts.begin() + static_cast<std::ptrdiff_t>(shown), "; "),
                                    more));
}

void add_asked(std::vector<DeviceRead> reads, std::string_view at_least, std::vector<std::string>& limitations) {
  auto texts = describe_all(std::move(reads), at_least);
  if (texts.empty()) return;
  const std::string more = texts.size() == 1 ? "" : fmt::format(" and {} more", texts.size() - 1);
  limitations.push_back(fmt::format("values that no kernel computed were read as zeros: {}{}", texts.front(), more));
}

}  // namespace

void add_reads(std::span<const DeviceRead> reads, bool all_counted, std::vector<std::string>& limitations) {
  std::vector<DeviceRead> sizes, asked;
  for (const DeviceRead& read : reads) (wants_no_size(read.op) ? asked : sizes).push_back(read);
  const std::string_view at_least = all_counted ? "" : "at least ";
  add_sizes(std::move(sizes), at_least, limitations);
  add_asked(std::move(asked), at_least, limitations);
}

bool depends_on_data(std::span<const DeviceRead> reads) {
  return !std::ranges::all_of(reads, wants_no_size, &DeviceRead::op);
}

}  // namespace oomdiag
