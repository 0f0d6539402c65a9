#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "profiler/trace/follower.h"

namespace oomdiag {

/// "oomdiag: step 12   allocated 8.12 GiB   reserved 8.90 GiB   peak 9.01 GiB   free 2.70 of 11.75 GiB".
std::string describe_live(const LiveFigures& figures);

/// The peaks of the last steps as bars of at most `columns`, newest last: between the lowest and the highest of them, so that one sees
/// what grows. "   steps ▁▂▃▅█ 8.12 to 9.01 GiB". Empty where nothing is to be seen, or it does not fit.
std::string describe_step_peaks(const std::vector<int64_t>& peaks, size_t columns);

/// While a program runs: one line about its memory at the bottom of the terminal, kept apart from what the program writes
/// there. The program does nothing for it: the figures are read from its trace. Silent where stderr is no terminal.
class LiveLine {
 public:
  LiveLine();
  ~LiveLine();
  LiveLine(const LiveLine&) = delete;
  LiveLine& operator=(const LiveLine&) = delete;

  bool is_shown() const { return shown_; }
  /// Reads on in the trace of the run and shows the figures. The first call that finds a trace makes space for the
  /// line.
  void update(const std::filesystem::path& run_folder) noexcept;

 private:
  void reserve_last_row(int rows);
  void show(const std::string& text) const;

  bool shown_ = false, unicode_ = false;
  int rows_ = 0;  ///< of the terminal when the last one was taken; 0 = it was not taken
  std::unique_ptr<TraceFollower> follower_;
};

}  // namespace oomdiag
