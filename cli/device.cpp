#include "cli/device.h"

#include <fmt/format.h>

#include "cli/real_gpu.h"
#include "cli/sizes.h"
#include "cli/terminal.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

constexpr const char* kDefaultCard = "h200";
constexpr int64_t kLeastMemory = int64_t{256} << 20;
constexpr int64_t kMostMemory = int64_t{16} << 40;

CardEntry find(const std::string& device, const Install& install) { return choose_card(install.cards, device); }

int64_t read_memory(const std::string& memory) {
  const int64_t bytes = parse_bytes(memory);
  if (bytes < kLeastMemory || bytes > kMostMemory) {
    throw Error(ErrorKind::usage, fmt::format("--memory {} is out of range", memory), "valid: 256MiB to 16TiB");
  }
  return bytes;
}

}  // namespace

void say_default(const DeviceChoice& choice) {
  if (!choice.by_default || !choice.card) return;
  say(fmt::format("no --device and no GPU: running on a virtual {}; oomdiag devices lists others", choice.card->name));
}

DeviceChoice choose_device(const std::string& device, const std::string& memory, const Install& install) {
  const int64_t memory_bytes = memory.empty() ? 0 : read_memory(memory);
  const bool by_default = device.empty();
  const bool is_real = by_default ? memory.empty() && has_real_gpu() : device == "real" || device == "cuda";
  if (is_real && memory_bytes != 0) {
    throw Error(ErrorKind::usage, "--memory changes virtual devices only",
                "name one: --device rtx4090 --memory " + memory);
  }
  if (is_real) return {.card = std::nullopt, .memory_bytes = 0, .by_default = by_default};
  return {.card = find(by_default ? kDefaultCard : device, install),
          .memory_bytes = memory_bytes,
          .by_default = by_default && memory.empty()};
}

}  // namespace oomdiag
