#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "profiler/trace/event_log.h"

namespace oomdiag {

/// Where a stack of frames says that something happened. Indices into the names of the snapshot, 0 = not known.
struct SnapshotPlace {
  uint32_t source = 0;        ///< innermost frame of the user's own code, "train.py:31"
  uint32_t inner_source = 0;  ///< innermost line of a package other than torch inside of that
  uint32_t op = 0;            ///< outermost operator, where C++ frames were recorded
  uint32_t node = 0;          ///< autograd node; "backward" where only that is known
  uint32_t scope = 0;         ///< "Optimizer.step" inside of torch.optim
  uint32_t module = 0;        ///< what the program called this part (torch.cuda.memory._set_memory_metadata)
  uint32_t stack = 0;         ///< Python calls of the first such stack, one per line of text, innermost first
  uint32_t native_stack = 0;  ///< likewise of C++, those that have a name
  uint32_t marks = 0;         ///< what its frames say, as StackMark
  uint64_t calls = 0;         ///< distinguishes stacks of Python calls
  bool in_module = false;     ///< inside of a call of an nn.Module
  bool frameless =
      false;  ///< of a stack without a frame: an allocation of backward, or one that is older than the history

  bool operator==(const SnapshotPlace&) const = default;
};

struct SnapshotBlock {
  enum class State : uint8_t { free, allocated, pending_free };
  uint64_t address = 0;
  int64_t bytes = 0;
  int64_t requested_bytes = 0;  ///< = bytes in old files, which do not say
  uint32_t place = 0;
  State state = State::free;

  bool operator==(const SnapshotBlock&) const = default;
};

struct SnapshotSegment {
  uint64_t address = 0;
  int64_t bytes = 0;
  uint64_t stream = 0;
  int device = 0;
  bool large = true;
  bool expandable = false;
  std::vector<SnapshotBlock> blocks{};  ///< in address order, without gaps

  bool operator==(const SnapshotSegment&) const = default;
};

/// The beginning or end of a scope that PyTorch or the program named: "Optimizer.step#AdamW.step", "ProfilerStep#3".
struct SnapshotAnnotation {
  uint32_t name = 0;
  int64_t time_us = 0;
  bool ends = false;

  bool operator==(const SnapshotAnnotation&) const = default;
};

/// A memory snapshot of PyTorch (torch.cuda.memory._snapshot), of any version since 2.1. Index 0 of `names` is empty,
/// index 0 of `places` says nothing. The allocator's history is kept as events whose time is in microseconds and whose
/// context is an index of `places`; "snapshot", "annotate" and what later versions may add is EventKind::none.
struct Snapshot {
  std::vector<std::string> names;
  std::vector<SnapshotPlace> places;
  std::vector<SnapshotSegment> segments;          ///< by device and address
  std::vector<EventLog> traces;                   ///< by device, oldest first; empty where no history was recorded
  std::vector<SnapshotAnnotation> annotations{};  ///< by time; none before 2.6
  std::vector<SnapshotBlock> host_blocks{};       ///< pinned; since 2.15, where that was asked for
  bool frees_are_requests = false;                ///< `skip_actions` left out when frees were completed
  std::string allocator_settings;                 ///< PYTORCH_CUDA_ALLOC_CONF
};

/// Reads a pickled snapshot; runs no code that may be in it. Memory is what the snapshot keeps of it, of its history about 12
/// bytes an entry; time is linear. Throws Error(input) for anything else.
Snapshot read_snapshot(const std::filesystem::path& file);

}  // namespace oomdiag
