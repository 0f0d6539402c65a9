#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "profiler/trace/trace.h"

namespace oomdiag {

/// What of one place of the program lives.
struct PlaceLevel {
  int64_t bytes = 0;  ///< requested
  int64_t blocks = 0;

  bool operator==(const PlaceLevel&) const = default;
};

/// Tells what lived at the ends of steps whose events were overwritten, by the blocks that have outlived them: the trace
/// knows of each the step that made it. Of a place where others may have lived too it tells nothing.
class EarlierLevels {
 public:
  /// The block `trace.initial[index]`.
  void add(const Trace& trace, uint32_t index);
  /// It was freed.
  void remove(uint32_t index);
  /// Says that a step has ended. What is freed after the last one, as an exception leaves the program, does not count.
  void end_step() { ++ends_; }

  /// By context: what lived on to the last step end and was made after each of `steps`. `first_kept` is the step in which
  /// the trace's events begin.
  std::map<uint32_t, std::vector<PlaceLevel>> made_after(std::span<const uint32_t> steps, uint32_t first_kept) const;

 private:
  static constexpr uint64_t kNever = ~uint64_t{0};
  /// What is freed so few steps after it was made is on its way: a batch, an output, gradients.
  static constexpr uint32_t kPassingSteps = 4;

  struct Earlier {
    int64_t bytes = 0;
    uint32_t context = 0;
    uint32_t step = 0;              ///< that made it; 0: not known
    uint64_t freed_after = kNever;  ///< so many step ends
  };

  std::vector<Earlier> blocks_;  ///< by index
  uint64_t ends_ = 0;
};

}  // namespace oomdiag
