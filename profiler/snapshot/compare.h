#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "profiler/snapshot/window.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// One side of a difference; empty where this side has nothing there.
struct ComparedEvent {
  uint64_t number = 0;  ///< which of its kind, from 1
  std::string what{};   ///< "alloc", "free", "segment_alloc", …
  int64_t bytes = 0;
  std::string where{};  ///< op, module and line, as far as this side knows

  bool operator==(const ComparedEvent&) const = default;
};

struct Difference {
  ComparedEvent left{}, right{};

  bool operator==(const Difference&) const = default;
};

/// Two sequences of events side by side.
struct ComparedSequence {
  uint64_t left_events = 0, right_events = 0;  ///< compared
  uint64_t equal = 0, changed = 0, only_left = 0, only_right = 0;
  uint64_t left_rest = 0, right_rest = 0;  ///< not compared: after the other side, a snapshot, was taken
  std::vector<Difference> first{};         ///< at most 10
  std::string version_difference{};        ///< what of PyTorch's versions explains all differences, or empty

  bool is_equal() const { return changed + only_left + only_right == 0; }
  /// In percent of the longer side, rounded down.
  double equal_percent() const;
  bool operator==(const ComparedSequence&) const = default;
};

/// Two recordings of one program: PyTorch's snapshot of a real GPU, say, and a trace of the virtual one.
struct Comparison {
  ComparedSequence blocks;         ///< allocs and frees by requested size
  ComparedSequence segments;       ///< by size; best fit breaks ties by address, so these may differ by a little
  bool only_frees_differ = false;  ///< of the blocks: allocs are the same, of the same sizes and in the same order
  int64_t left_peak_bytes = 0, right_peak_bytes = 0;          ///< allocated, within what is compared
  int64_t left_reserved_bytes = 0, right_reserved_bytes = 0;  ///< at most
  std::optional<Window> window{};                             ///< where the one that begins late begins in the other
  bool left_begins_late = false;                              ///< … it is the left one
  bool sizes_are_guessed = false;                             ///< a side has blocks that are older than its history

  /// Between two address layouts of one GPU reserved bytes were seen to move by up to 1.3 %.
  static constexpr double kReservedTolerance = 0.015;
  bool reserved_agrees() const;
  /// How large a block was that is older than the history and freed since is guessed, and which free block another one gets
  /// depends on addresses. Where all events were equal, peaks were seen to differ by up to 0.35 %.
  static constexpr double kPeakTolerance = 0.005;
  bool peak_agrees() const;
  /// Neither side has an event of this GPU.
  bool is_empty() const {
    return blocks.left_events + blocks.right_events + segments.left_events + segments.right_events == 0;
  }
  /// What is in use where a window begins and the blocks agree exactly, peak and reserved bytes within their tolerances.
  bool is_equal() const {
    return (!window || window->alive_elsewhere == 0) && blocks.is_equal() && peak_agrees() && reserved_agrees();
  }

  /// Whether the right side is a run of the program that the left side shows: all but 2 % of its allocs and frees are equal; or all but a
  /// tenth, and but 2 % are there with another size, and so little with it that the peaks are within 1 %. So it is with convolutions on an
  /// H100 or H200, for which cuDNN takes workspaces of other sizes than it says without a GPU (of a ResNet-50 5 % of all events).
  bool is_same_program() const;

  bool operator==(const Comparison&) const = default;
};

/// Compares what two traces say about one GPU each. A snapshot that begins in the middle is laid beside the part of the
/// other that it shows.
Comparison compare(const Trace& left, const Trace& right, uint8_t device);

}  // namespace oomdiag
