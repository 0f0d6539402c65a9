#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/device/snapshot_device.h"
#include "cli/reports/reports.h"

namespace oomdiag {

/// Runs the program of a memory snapshot on the virtual device `gpu`, and lays the run beside the snapshot. What comes back
/// explains the run, which knows modules, autograd nodes and saved tensors; a limitation says how far it is the snapshot's.
/// Throws Error(usage) if no GPU is named, Error(input) with the first difference if the program is another one.
Explained match_program(const std::filesystem::path& snapshot, const SnapshotDevice& gpu,
                        std::vector<std::string> program);

}  // namespace oomdiag
