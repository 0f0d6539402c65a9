#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "extension/virtual_device/device_files/gpu.h"  // IWYU pragma: export: what a GpuEntry has
#include "profiler/cost/time_model.h"

namespace oomdiag {

/// "8.6".
struct ComputeCapability {
  int major = 0, minor = 0;  ///< 0.0 = not known

  std::string text() const;
  auto operator<=>(const ComputeCapability&) const = default;
};

/// A GPU of the catalogue, or of a user's own file.
struct GpuEntry {
  std::string id;    ///< as after --device
  std::string name;  ///< as CUDA gives it
  std::vector<std::string> aliases;
  int64_t total_bytes = 0;  ///< as the CUDA runtime reports it
  std::string mark;         ///< how total_bytes is known: the mark of its source
  ComputeCapability capability;
  int64_t context_bytes = 0;   ///< estimate of what a process takes before PyTorch does, first kernel included
  Driver driver{};             ///< that was asked for
  std::string why_not;         ///< why this wheel cannot run on it; empty if it can
  std::filesystem::path file;  ///< empty for a GPU of which too little is known
  Gpu gpu;                     ///< all of the file; empty with it

  bool operator==(const GpuEntry& other) const { return id == other.id && file == other.file; }
  /// Whether the memory that this driver leaves is known.
  bool knows_driver() const;
};

/// Reads one GPU. Throws Error(input) that names the field if it is no device file.
GpuEntry read_gpu_entry(const std::filesystem::path& file);

/// The GPUs of `folder` that this torch wheel runs on, by ascending memory. Throws Error(environment) if `folder`
/// cannot be read.
std::vector<GpuEntry> read_catalogue(const std::filesystem::path& folder);

/// The others that are known by name: those of `folder` without code in the wheel, and those that have no profile.
std::vector<GpuEntry> read_unsupported(const std::filesystem::path& folder);

/// The GPU that goes by `name`: id or alias, in any case. Throws Error(usage) that names the nearest.
const GpuEntry& find_gpu(const std::vector<GpuEntry>& catalogue, std::string_view name);

/// "rtx3090@550" is the GPU with a driver of branch 550, "rtx3090@wddm" that of a Windows machine (parse_driver): takes that from
/// the end of `device`. Throws Error(usage) if it is neither.
Driver take_driver(std::string& device);

/// The GPU with this driver, by which it goes then: "rtx3090@550".
GpuEntry with_driver(GpuEntry gpu, const Driver& driver);

/// What --device names: a GPU of the catalogue in `folder`, or a file, and a driver. Throws Error(usage or input) if there is
/// none, or none that this wheel runs on.
GpuEntry choose_gpu(const std::filesystem::path& folder, const std::string& device);

/// What the GPU can do in a second, by its file. `name` is as CUDA gives it, or as after --device. `own`: the device file of the run,
/// which counts before the catalogue if it is there and has that name. None if there is no such GPU.
std::optional<DeviceRates> rates_of_device(std::string_view name, const std::filesystem::path& own = {});

}  // namespace oomdiag
