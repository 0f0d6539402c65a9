#include "cli/device/snapshot_device.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cli/device/gpus.h"
#include "cli/python/install.h"
#include "cli/terminal/sizes.h"
#include "profiler/error.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

// GPUs that this torch has no code for are as good: nothing is run.
GpuEntry find_named(std::string device) {
  const Driver driver = take_driver(device);
  const std::filesystem::path folder = find_install().gpus;
  if (device.ends_with(".json")) return with_driver(read_gpu_entry(device), driver);
  std::vector<GpuEntry> all = read_catalogue(folder);
  for (GpuEntry& gpu : read_unsupported(folder)) {
    if (gpu.total_bytes > 0) all.push_back(std::move(gpu));
  }
  return with_driver(find_gpu(all, device), driver);
}

}  // namespace

void add_snapshot_device_options(CLI::App& command, SnapshotDevice& options) {
  command
      .add_option("--device", options.device,
                  "of a snapshot: the GPU that it was taken on, a name of oomdiag devices; no snapshot names it")
      ->type_name("NAME");
  command.add_option("--memory", options.memory, "of a snapshot: the memory of its GPU, as in 24GiB")
      ->type_name("SIZE");
}

void set_device_of_snapshot(const SnapshotDevice& options, Trace& trace) {
  if (!options.is_given()) return;
  Device gpu{.name = "unknown model"};
  if (!options.device.empty()) {
    const GpuEntry entry = find_named(options.device);
    gpu.name = entry.name;
    gpu.total_bytes = entry.total_bytes;
    gpu.compute_major = entry.capability.major;
    gpu.compute_minor = entry.capability.minor;
  }
  if (!options.memory.empty()) gpu.total_bytes = parse_bytes(options.memory);
  for (Device& device : trace.devices) {
    if (device.total_bytes > gpu.total_bytes) {
      throw Error(ErrorKind::usage,
                  fmt::format("the GPU of this snapshot has at least {} GiB, and the one that was given {} GiB",
                              to_gib(device.total_bytes), to_gib(gpu.total_bytes)),
                  "that much was reserved and free at once; give the GPU that it was taken on");
    }
    device = gpu;
  }
}

}  // namespace oomdiag
