#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "cli/device/gpus.h"
#include "cli/python/install.h"

namespace CLI {
class App;
}

namespace oomdiag {

/// What the virtual device can hold: driver/devices.h.
inline constexpr int kMaxGpus = 16;

/// The most memory that a virtual GPU can have: more than any program takes.
inline constexpr int64_t kMaxGpuBytes = int64_t{16} << 40;

/// What the command line says of the device.
struct DeviceOptions {
  std::string device{};
  std::string memory{};
  int count = 0;  ///< 0 = one of each
  bool clocked = false;
};

/// Adds --device, --memory, --count and --clocked to a command.
void add_device_options(CLI::App& command, DeviceOptions& options);

/// The NVIDIA GPUs of this machine.
struct RealGpu {
  std::string name{};  ///< of the first, as its driver gives it; empty = no GPU or no driver was found
};

/// Virtual devices in one machine.
struct VirtualHost {
  std::vector<GpuEntry> gpus{};  ///< at least one
  int64_t memory_bytes = 0;      ///< of each device, in place of the GPU's own; 0 = the GPU's own
  bool clocked = false;          ///< work takes modelled time

  /// Memory of the first device.
  int64_t bytes_of_device() const { return memory_bytes > 0 ? memory_bytes : gpus.front().total_bytes; }
};

/// Where a program is to run.
struct DeviceChoice {
  std::variant<RealGpu, VirtualHost> device{};
  bool by_default = false;  ///< nobody asked for it

  const VirtualHost* virtual_host() const { return std::get_if<VirtualHost>(&device); }
  bool is_virtual() const { return virtual_host() != nullptr; }
};

/// "NVIDIA A100 80GB (virtual)", "4 x NVIDIA H200 (virtual)".
std::string describe(const VirtualHost& host);
/// The same, or "the real GPU".
std::string describe(const DeviceChoice& choice);

/// Says on stderr that there is no GPU and which GPU stands in for it, if nobody chose that GPU.
void say_default(const DeviceChoice& choice);

/// Whether this is what --device calls the real GPU: "real" or "cuda".
bool names_real_gpu(const std::string& device);

/// The GPUs of a list of names of the catalogue and paths to device files: one at least. Throws Error(usage).
std::vector<GpuEntry> choose_gpus(const std::string& list, const Install& install);

/// What the options mean: "real" or "cuda", or such a list. Without --device the real GPU where there is one, else (or if
/// another option wants a virtual one) a virtual H200. The driver is asked for the real GPU here and nowhere else; `run`
/// may name a real GPU that is not there, as a program need not use it. Throws Error(usage).
DeviceChoice choose_device(const DeviceOptions& options, const Install& install);

/// Throws Error(environment) if the real GPU was chosen and none was found.
void require_gpu(const DeviceChoice& choice);

/// Throws Error(usage) if the driver that --device names (rtx3090@550) is too old for the CUDA that the program's torch was
/// built for: "2.15.0+cu132".
void check_driver(const DeviceChoice& choice, const std::string& torch_version);

/// The name of the first device that the CUDA driver shows; empty if there is none. Asked in a child process, so that neither
/// a driver's threads nor its crashes become ours; takes milliseconds without a driver, some 100 ms with one.
std::string name_of_real_gpu();

}  // namespace oomdiag
