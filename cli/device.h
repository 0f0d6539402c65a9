#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/cards.h"
#include "cli/install.h"

namespace CLI {
class App;
}

namespace oomdiag {

/// What the command line says of the device.
struct DeviceOptions {
  std::string device{};
  std::string memory{};
  int count = 0;  ///< 0 = one of each
  bool clocked = false;
};

/// Adds --device, --memory, --count and --clocked to a command.
void add_device_options(CLI::App& command, DeviceOptions& options);

/// Where a program is to run.
struct DeviceChoice {
  std::vector<CardEntry> cards{};  ///< the virtual devices; none = the real ones
  int64_t memory_bytes = 0;        ///< of each, in place of the card's own; 0 = the card's own
  bool clocked = false;            ///< work takes modelled time
  bool by_default = false;         ///< nobody asked for it

  bool is_virtual() const { return !cards.empty(); }
};

/// "NVIDIA A100 80GB (virtual)", "4 x NVIDIA H200 (virtual)", "the real GPU".
std::string describe(const DeviceChoice& choice);

/// Says on stderr that there is no GPU and which card stands in for it, if nobody chose that card.
void say_default(const DeviceChoice& choice);

/// Whether this is what --device calls the real GPU: "real" or "cuda".
bool names_real_gpu(const std::string& device);

/// What the options mean: "real" or "cuda", or a list of names of the catalogue and paths to card files. Without
/// --device the real GPU where there is one, else (or if another option wants a virtual one) a virtual H200. Throws
/// Error(usage).
DeviceChoice choose_device(const DeviceOptions& options, const Install& install);

/// Throws Error(usage) if the driver that --device names (rtx3090@550) is too old for the CUDA that the program's torch was
/// built for: "2.15.0+cu132".
void check_driver(const DeviceChoice& choice, const std::string& torch_version);

}  // namespace oomdiag
