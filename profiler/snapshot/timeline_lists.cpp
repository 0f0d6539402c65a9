#include <algorithm>
#include <span>
#include <vector>

#include "profiler/snapshot/timeline.h"
#include "profiler/snapshot/timeline_reader.h"

// The two kinds differ from each other by how deep their numbers lie:
//
//   [[t, t, …], [[0, bytes of category 0, …], …]]     the times of all rows, in µs, then the rows
//   [[t, action, bytes, category], …]                 in ns, -1 = before the profile; bytes given back are negative
//
// The first list may be of either kind: it is kept until the second one begins.

namespace oomdiag {
namespace {

/// A row of raw events closes at depth two, one of sizes at depth three.
class ListReader : public TimelineReader {
 public:
  const char* format() const override { return "a JSON list"; }
  const char* hint() const override { return "give a snapshot.pickle of PyTorch, which also has blocks and lines"; }
  MemoryTimeline finish() override {
    if (timeline_.kind == Kind::sizes && rows_ != times_.size())
      reject(", a memory timeline whose times and sizes differ in number");
    if (timeline_.kind == Kind::raw && rows_ > 0 && gpu_.changes == 0) take_totals(0, now_);  // all was there before
    if (gpu_.changes == 0) reject(", a memory timeline without an allocation");
    timeline_.gpus[0] = gpu_;
    return std::move(timeline_);
  }

  bool string(string_t&) override { return reject_row(); }
  bool start_object(size_t) override { return reject_row(); }
  bool start_array(size_t) override {
    row_.clear();
    if (++depth_ < 3) return true;
    if (depth_ > 3 || lists_ != 1) return reject_row();
    if (timeline_.kind == Kind::sizes) return true;
    timeline_.kind = Kind::sizes;  // the second list is one of lists: the first one held the times
    times_ = std::move(first_);
    return true;
  }
  bool end_array() override {
    const size_t depth = depth_--;
    if (depth == 3) return take_sizes();
    if (depth == 1) return timeline_.kind == Kind::sizes || lists_ != 1 || take_raw(first_);
    if (++lists_ == 1) {
      first_ = std::move(row_);
      return true;
    }
    if (timeline_.kind == Kind::sizes) return lists_ == 2 || reject_row();
    if (lists_ == 2 && first_.empty() && row_.empty()) return true;  // of sizes, without a row
    return (lists_ > 2 || take_raw(first_)) && take_raw(row_);
  }

 private:
  using Kind = MemoryTimeline::Kind;
  static constexpr size_t kMaxInRow = 64;  // but for the first, which may be one of times

  bool number(double value) override {
    if (depth_ < 2 || (lists_ > 0 && row_.size() == kMaxInRow)) return reject_row();
    row_.push_back(value);
    return true;
  }
  bool reject_row() { return reject(", but not of rows as torch.profiler's export_memory_timeline writes"); }

  // The first number of a row is 0, for those who draw it.
  bool take_sizes() {
    if (row_.size() < 2 || rows_ == times_.size()) return reject_row();
    take_totals(times_[rows_++], std::span(row_).subspan(1));
    return true;
  }

  bool take_raw(const std::vector<double>& row) {
    constexpr auto kUnknown = kTimelineCategories.size() - 1;
    timeline_.kind = Kind::raw;
    if (row.size() != 4) return reject_row();
    ++rows_;
    const bool has_time = row[0] >= 0;  // what was there before has none
    if (has_time && gpu_.changes == 0) take_totals(row[0] / 1000, now_);
    now_[row[3] >= 0 && row[3] < kUnknown ? static_cast<size_t>(row[3]) : kUnknown] += row[2];
    if (has_time) take_totals(row[0] / 1000, now_);
    return true;
  }

  void take_totals(double time_us, std::span<const double> by_category) {
    double sum = 0;
    for (const double bytes : by_category) sum += bytes;
    if (!note(gpu_, time_us, whole(sum))) return;
    gpu_.peak = {};
    const size_t common = std::min(by_category.size(), gpu_.peak.size());
    std::ranges::transform(by_category.first(common), gpu_.peak.begin(), whole);
  }

  MemoryTimeline timeline_{.kind = Kind::raw};
  TimelineOfGpu gpu_;
  size_t depth_ = 0, lists_ = 0, rows_ = 0;  ///< lists_: that were closed at depth two
  std::vector<double> first_, times_, row_;
  std::array<double, kTimelineCategories.size()> now_{};
};

}  // namespace

std::unique_ptr<TimelineReader> make_list_reader() { return std::make_unique<ListReader>(); }

}  // namespace oomdiag
