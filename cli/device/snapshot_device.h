#pragma once

#include <string>

#include "profiler/trace/trace.h"

namespace CLI {
class App;
}

namespace oomdiag {

/// The GPU that a snapshot was taken on, which the snapshot does not name. Empty: not given.
struct SnapshotDevice {
  std::string device;  ///< as after --device
  std::string memory;  ///< as after --memory

  bool is_given() const { return !device.empty() || !memory.empty(); }
};

/// Adds --device and --memory for commands that read snapshots.
void add_snapshot_device_options(CLI::App& command, SnapshotDevice& options);

/// Gives the GPUs of a snapshot their name and size. Throws Error(usage) where the GPU is not known, or smaller than what
/// the snapshot shows.
void set_device_of_snapshot(const SnapshotDevice& options, Trace& trace);

}  // namespace oomdiag
