#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oomdiag {

/// What a GPU can do at most in a second, by its maker's figures; 0 = not known, or it cannot do that. Products are dense; those of
/// 16 and 8 bits add up in fp32.
struct GpuRates {
  int64_t fp32_flops = 0, tf32_flops = 0, fp16_flops = 0, bf16_flops = 0, fp8_flops = 0, int8_flops = 0;
  int64_t memory_bytes = 0;
  int64_t bus_bytes = 0;     ///< between host and GPU, in each direction
  int64_t nvlink_bytes = 0;  ///< to other GPUs of the host, in each direction; 0: it has no NVLink
  int64_t host_ns_per_operator =
      0;  ///< that its host takes to submit an operator in forward; 0: what a host usually takes

  bool operator==(const GpuRates&) const = default;
};

/// What a GPU says of itself, read from a data file like those beside this header, where each number has its source.
struct Gpu {
  std::string id;  ///< as after --device; the file's name where it has none
  std::vector<std::string> aliases;
  std::string name;         ///< as CUDA gives it
  int64_t total_bytes = 0;  ///< as cudaDeviceProp::totalGlobalMem has it, less than is printed on the box
  std::string total_mark;   ///< how that is known: "S", "C", "P", "U" or "M" (see the CLI's explain_mark)
  /// The same with older drivers (kOlderDrivers), which keep less for themselves; 0 = not known, or no other.
  int64_t older_total_bytes = 0;
  std::string older_total_mark;
  /// The same under WDDM, Windows' driver model: all that nvidia-smi lists; 0 = not known, or Windows does not run it that way.
  int64_t wddm_total_bytes = 0;
  std::string wddm_total_mark;
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  int l2_bytes = 0;
  int clock_khz = 0;
  int memory_clock_khz = 0;
  int memory_bus_bits = 0;
  int64_t context_bytes = 0;       ///< taken when the context is made; an estimate, but for measured GPUs
  int64_t first_kernel_bytes = 0;  ///< taken by the first kernel or library handle; the same

  GpuRates rates{};

  // These follow from the compute capability where the file does not have them.
  int threads_per_multiprocessor = 0;
  int blocks_per_multiprocessor = 0;
  int registers_per_multiprocessor = 0;
  int shared_bytes_per_multiprocessor = 0;
  int shared_bytes_per_block = 0;
  int shared_bytes_per_block_optin = 0;
  int reserved_shared_bytes_per_block = 0;
};

/// The GPU in the JSON file `path`. Throws std::runtime_error with a line for the user, which names the field:
/// unreadable, no JSON, a missing, unknown or absurd field.
Gpu read_gpu(const std::string& path);

/// A branch of the driver: 550 of 550.54.14. Those of which GPUs were seen with more memory end with this one: the
/// RTX 4080 SUPER has 16 072 MiB with 550, the RTX 4090, RTX 4070 Ti SUPER and T4 have the newer totals from 555 and 560 on.
inline constexpr int kOlderDrivers = 550;
inline constexpr int kLeastDriver = 525;  ///< the first of CUDA 12
inline constexpr int kMaxDriver = 999;

/// The driver of a machine, as after "@" of --device.
struct Driver {
  int branch = 0;          ///< as in 550; 0 = the newest
  bool is_wddm = false;    ///< of Windows, or of WSL2, whose memory Windows manages
  int64_t host_bytes = 0;  ///< with it: what it puts into host memory at most once the GPU is full

  bool operator==(const Driver&) const = default;
};

/// What Windows keeps of so large a GPU where a program wants all of it: 570 MiB, the median of what neither PyTorch nor the context
/// (by the device files) has in ten out-of-memory messages with "0 bytes free", whatever the size of the GPU (RTX 3050 of 4 GiB to RTX 3090):
/// 482 to 697, and 935 on an RTX 5060. Of smaller ones it keeps less: an eighth here (two of 2 GiB: 256 and 287 MiB with the context).
int64_t bytes_of_windows(int64_t total_bytes);

/// What it puts into host memory where nobody says: half of a host's 32 GiB. By Microsoft's documentation a GPU may have half of the
/// host's memory ("Calculating graphics memory"), and by NVIDIA's its driver uses that from 536.40 on, unless the setting "CUDA -
/// Sysmem Fallback Policy" says otherwise.
inline constexpr int64_t kUsualHostBytes = int64_t{16} << 30;

/// "", "550", "wddm", "wddm+0" or "wddm+16GiB" (KiB, MiB, GiB or bytes). Throws std::invalid_argument, which says what is wrong with it.
Driver parse_driver(std::string_view text);
std::string to_text(const Driver& driver);

/// What CUDA version the driver of this branch has, as in 12040 (CUDA Toolkit release notes, "CUDA Driver"); 0 for those
/// newer than the table and older than kLeastDriver.
int cuda_version_of(int driver);

/// The GPU as it is with this driver.
Gpu with_driver(Gpu gpu, const Driver& driver);

/// Whether machines with several of this GPU link them by NVLink: those of data centres that are no PCIe boards.
bool is_linked(const Gpu& gpu);

/// Whether GPUs of this kind reach each other's memory: NVIDIA's driver lets no GeForce do so.
bool has_peers(const Gpu& gpu);

/// Whether its memory is the host's too (GB10).
bool is_integrated(const Gpu& gpu);

/// Whether one of `architectures` ("75,80,86,90") has code that the GPU runs: of its own major version and not above it
/// (CUDA programming guide, binary compatibility).
bool runs_code_for(const Gpu& gpu, const std::string& architectures);

/// The newest of those: the code that a kernel of such a build runs. CUB sizes its scratch space by it. The GPU's own
/// capability where there is none.
int pick_architecture(const Gpu& gpu, const std::string& architectures);

}  // namespace oomdiag
