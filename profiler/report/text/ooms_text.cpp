#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "profiler/counted.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/words/place_text.h"
#include "profiler/report/words/printable.h"
#include "profiler/report/words/text_options.h"

namespace oomdiag {
namespace {

// One line for each place: the most that it asked for, and what it got instead of that.
std::vector<ReportRecovered> sum_recovered(const ReportOfDevice& device) {
  std::vector<ReportRecovered> sums;
  for (const ReportRecovered& one : device.recovered_by_library) {
    const auto same = [&](const ReportRecovered& sum) { return sum.op == one.op && sum.node == one.node; };
    const auto sum = std::find_if(sums.begin(), sums.end(), same);
    if (sum == sums.end()) {
      sums.push_back(one);
      continue;
    }
    const int64_t count = sum->count + one.count;
    if (one.requested_bytes > sum->requested_bytes) *sum = one;
    sum->count = count;
  }
  return sums;
}

// "3 times up to 2.00 GiB in forward, steps 1 to 9: …": one line for each place.
void add_caught(std::string& text, const ReportOfDevice& device, const TextOptions& options) {
  struct Place {
    ReportFailure largest;
    int64_t count = 0;
    uint32_t first = 0, last = 0;
  };
  std::vector<std::pair<std::string, Place>> places;
  for (const ReportFailure& one : device.caught) {
    const std::string where = std::string(name_of(one.phase)) + place_text(one, options);
    auto place = std::ranges::find(places, where, &std::pair<std::string, Place>::first);
    if (place == places.end()) place = places.insert(places.end(), {where, {.largest = one, .first = one.step}});
    ++place->second.count;
    place->second.last = one.step;
    if (one.requested_bytes > place->second.largest.requested_bytes) place->second.largest = one;
  }
  constexpr size_t kMaxOnFirstScreen = 2;
  const size_t shown = options.all || places.size() <= kMaxOnFirstScreen + 1 ? places.size() : kMaxOnFirstScreen;
  int64_t more = device.caught_count - static_cast<int64_t>(device.caught.size());
  for (const auto& [key, place] : std::span(places).subspan(shown)) more += place.count;
  for (const auto& [key, place] : std::span(places).first(shown)) {
    const std::string where = place_text(place.largest, options);
    const bool several = place.count > 1;
    const std::string steps = place.first == place.last ? fmt::format("step {}", place.last)
                                                        : fmt::format("steps {} to {}", place.first, place.last);
    const std::string count = several ? fmt::format("{} times up to ", place.count) : "";
    add(text, "caught",
        fmt::format("{}{} in {}, {}{}{}", count, with_unit(place.largest.requested_bytes), name_of(place.largest.phase),
                    steps, where.empty() ? "" : ": ", where));
  }
  if (more > 0) add(text, "caught", fmt::format("{} more", more));
}

}  // namespace

std::string ooms_text(const ReportOfDevice& device, const TextOptions& options) {
  std::string text;
  // Beside an error that ended the run they read like a second one.
  const bool names_recovered = options.all || !device.failure;
  for (const ReportRecovered& one : names_recovered ? sum_recovered(device) : std::vector<ReportRecovered>()) {
    const std::string& where = !one.node.empty() ? one.node : one.op;
    add(text, "recovered",
        fmt::format("{} inside {}: the library requested a workspace of {} and went on {}, which may be slower",
                    counted(one.count, "OOM"), printable(where.empty() ? "a library" : where, 40),
                    with_unit(one.requested_bytes),
                    one.granted_bytes > 0 ? "with " + with_unit(one.granted_bytes) : "without it"));
  }
  for (const NonPytorchOwner& one : device.failed_driver_requests) {
    add(text, "driver",
        fmt::format("{} that {} requested itself could not be allocated", with_unit(one.bytes),
                    printable(one.owner, 40)));
  }
  add_caught(text, device, options);
  return text;
}

}  // namespace oomdiag
