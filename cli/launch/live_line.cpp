#include "cli/launch/live_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string_view>

#include "cli/reports/run_folder.h"
#include "cli/terminal/terminal.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/words/printable.h"
#include "profiler/trace/follower.h"

// The line must never get between the program's own output. So the program gets all rows but the last as its scrolling region
// and the line has the last row; each update saves the cursor, writes there and puts the cursor back, in one write, as apt
// does it. A terminal that was resized gets a new region at the next update.

namespace oomdiag {
namespace {

constexpr int kFewestRows = 6;

void write_whole(const std::string& text) {
  // One call, so that nothing of the program gets in between. What a terminal does not take is lost.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

std::string describe_live(const LiveFigures& figures) {
  return fmt::format("oomdiag: step {}   allocated {}   reserved {}   peak {}   free {} of {}{}", figures.step,
                     with_unit(figures.allocated_bytes), with_unit(figures.reserved_bytes),
                     with_unit(figures.peak_allocated_bytes), with_unit(figures.free_bytes()),
                     with_unit(figures.total_bytes), figures.ooms == 0 ? "" : fmt::format("   OOMs {}", figures.ooms));
}

std::string describe_step_peaks(const std::vector<int64_t>& peaks, size_t columns) {
  constexpr std::array<std::string_view, 8> kEighths = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr size_t kFewest = 4;
  if (peaks.size() < kFewest) return {};
  const auto draw = [&](std::span<const int64_t> last) {
    const auto [least, most] = std::ranges::minmax(last);
    const Unit unit = unit_for(most);
    std::string bars;
    for (const int64_t peak : last) {
      const double share = most > least ? static_cast<double>(peak - least) / static_cast<double>(most - least) : 0;
      bars += kEighths[static_cast<size_t>(std::lround(share * 7))];
    }
    const std::string range = least == most ? in_unit(most, unit) : in_unit(least, unit) + " to " + in_unit(most, unit);
    return fmt::format("   steps {} {} {}", bars, range, unit.name);
  };
  for (size_t count = peaks.size(); count >= kFewest; --count) {  // the newest that fit
    std::string text = draw(std::span(peaks).last(count));
    if (count_columns(text) <= columns) return text;
  }
  return {};
}

LiveLine::LiveLine()
    : shown_(output_capabilities(STDERR_FILENO).is_terminal && output_capabilities(STDERR_FILENO).moves_cursor),
      unicode_(output_capabilities(STDERR_FILENO).unicode) {}

LiveLine::~LiveLine() {
  if (rows_ == 0) return;
  // The region back to all rows, the last one cleared, the cursor where it was.
  write_whole(fmt::format("\0337\033[r\033[{};1H\033[2K\0338", rows_));
}

void LiveLine::update(const std::filesystem::path& run_folder) noexcept try {
  if (!shown_ || tcgetpgrp(STDERR_FILENO) != getpgrp()) return;  // in the background the terminal is not ours
  if (follower_ == nullptr) follower_ = follow_run(run_folder);
  if (follower_ == nullptr) return;
  const TerminalSize size = terminal_size(STDERR_FILENO);
  const int rows = static_cast<int>(size.rows);
  if (rows < kFewestRows || size.columns == 0) return;
  if (rows != rows_) reserve_last_row(rows);
  const LiveFigures& figures = follower_->read_on();
  const size_t columns = size.columns - 1;
  std::string text = printable(describe_live(figures), columns);
  if (unicode_) text += describe_step_peaks(figures.step_peaks, columns - count_columns(text));
  show(text);
} catch (const std::exception&) {  // a line less; the program runs on
}

void LiveLine::reserve_last_row(int rows) {
  // A line feed first: what stands in the last row moves up. The region moves the cursor, so it is put back.
  write_whole(fmt::format("\n\0337\033[1;{}r\0338\033[1A", rows - 1));
  rows_ = rows;
}

void LiveLine::show(const std::string& text) const {
  write_whole(fmt::format("\0337\033[{};1H\033[2K{}\0338", rows_, text));
}

}  // namespace oomdiag
