#include "profiler/snapshot/window.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "profiler/event.h"
#include "profiler/snapshot/prefix_matches.h"
#include "profiler/trace/trace.h"

// Steps repeat, so a place is found by what is in use there, then by how far the events agree. The state is compared by
// its sum first, which is kept while walking over the whole; the sizes themselves only at the place that was chosen.

namespace oomdiag {
namespace {

constexpr uint64_t kFewest = 64;    ///< events in a row that agree, below which a place is chance
constexpr uint64_t kMax = 1 << 14;  ///< of a place, to choose by: more do not help

struct Element {
  int64_t bytes = 0;
  EventKind kind = EventKind::none;
  uint64_t event = 0;

  bool is_like(const Element& other) const { return bytes == other.bytes && kind == other.kind; }
};

std::vector<Element> read_blocks(const Trace& trace, uint8_t device) {
  std::vector<Element> elements;
  for (auto at = trace.events.begin(); at != trace.events.end(); ++at) {
    if (is_of_block(at->kind) && at->device == device) elements.push_back({at->bytes, at->kind, at.index()});
  }
  return elements;
}

/// What is in use, by size.
class InUse {
 public:
  InUse(const Trace& trace, uint8_t device) {
    const std::set<uint64_t> freed = freed_before(trace, device);
    for (const Event& event : trace.initial) {
      if (event.device == device && !freed.contains(event.address)) add(event.bytes, 1);
    }
  }

  void apply(const Element& element) { add(element.bytes, element.kind == EventKind::alloc ? 1 : -1); }

  int64_t bytes() const { return bytes_; }
  int64_t count() const { return count_; }
  bool has_sum_of(const InUse& other) const { return bytes_ == other.bytes_ && count_ == other.count_; }
  uint64_t difference(const InUse& other) const {
    uint64_t blocks = 0;
    std::map<int64_t, int64_t> counts = counts_;
    for (const auto& [size, count] : other.counts_) counts[size] -= count;
    for (const auto& [size, count] : counts) blocks += static_cast<uint64_t>(count < 0 ? -count : count);
    return blocks;
  }

 private:
  /// Blocks whose free was asked for before the first event, and is completed by a later one.
  static std::set<uint64_t> freed_before(const Trace& trace, uint8_t device) {
    std::set<uint64_t> seen, freed;
    for (auto at = trace.events.begin(); !trace.initial.empty() && at != trace.events.end(); ++at) {
      if (at->device != device) continue;
      const bool completes = at->kind == EventKind::free_completed;
      if (completes && !seen.contains(at->address)) freed.insert(at->address);
      if (completes || is_of_block(at->kind)) seen.insert(at->address);
    }
    return freed;
  }

  void add(int64_t bytes, int64_t count) {
    counts_[bytes] += count;
    bytes_ += count * bytes;
    count_ += count;
  }

  std::map<int64_t, int64_t> counts_;
  int64_t bytes_ = 0, count_ = 0;
};

}  // namespace

std::optional<Window> find_window(const Trace& part, const Trace& whole, uint8_t device) {
  const std::vector<Element> a = read_blocks(part, device), b = read_blocks(whole, device);
  const InUse at_begin(part, device);
  InUse in_use(whole, device);
  struct Place {
    uint64_t agree = 0;
    bool same_state = false, has_room = false;
    size_t at = 0;
    auto operator<=>(const Place&) const = default;
  };
  Place best;
  const auto is_like = [](const Element& one, const Element& other) { return one.is_like(other); };
  const auto begin = std::span<const Element>(a).first(std::min<size_t>(a.size(), kMax));
  PrefixMatches<Element, decltype(is_like)> matches(begin, is_like);
  for (size_t at = 0; at < b.size(); ++at) {
    if (const uint64_t agree = matches.next(b, at); agree > 0) {
      best = std::max(best, {agree, in_use.has_sum_of(at_begin), b.size() - at >= a.size(), at});
    }
    in_use.apply(b[at]);
  }
  if (best.agree < std::min<uint64_t>(kFewest, a.size()) || best.agree == 0) return {};
  InUse there(whole, device);
  for (size_t i = 0; i < best.at; ++i) there.apply(b[i]);
  const uint64_t event = b[best.at].event;
  return Window{.first_event = event,
                .blocks_before = best.at,
                .step = whole.process.snapshot ? 0 : whole.step_of(whole.events[event].sequence),
                .alive = static_cast<uint64_t>(std::max<int64_t>(0, there.count())),
                .alive_bytes = there.bytes(),
                .alive_elsewhere = there.difference(at_begin)};
}

}  // namespace oomdiag
