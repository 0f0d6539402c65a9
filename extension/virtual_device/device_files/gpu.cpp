#include "extension/virtual_device/device_files/gpu.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

/// Limits by compute capability: CUDA programming guide, technical specifications.
struct Architecture {
  int major, minor;
  int threads, blocks;                                ///< resident on one multiprocessor
  int shared_bytes, shared_bytes_of_block, reserved;  ///< a block's at most (opt-in); the system's of each block
};
constexpr std::array<Architecture, 11> kArchitectures{{
    {7, 0, 2048, 32, 98304, 98304, 0},
    {7, 5, 1024, 16, 65536, 65536, 0},
    {8, 0, 2048, 32, 167936, 166912, 1024},
    {8, 6, 1536, 16, 102400, 101376, 1024},
    {8, 7, 1536, 16, 167936, 166912, 1024},
    {8, 9, 1536, 24, 102400, 101376, 1024},
    {9, 0, 2048, 32, 233472, 232448, 1024},
    {10, 0, 2048, 32, 233472, 232448, 1024},
    {10, 3, 2048, 32, 233472, 232448, 1024},
    {12, 0, 1536, 24, 102400, 101376, 1024},
    {12, 1, 1536, 24, 102400, 101376, 1024},
}};

[[noreturn]] void reject_field(const std::string& key, const std::string& complaint) {
  throw std::runtime_error("\"" + key + "\" " + complaint);
}

constexpr int64_t kNeeded = -1;

/// `file[key]["value"]`, within bounds; `absent` when the file has no such key, unless it is kNeeded.
int64_t read_number(const nlohmann::json& file, const std::string& key, int64_t least, int64_t most,
                    int64_t absent = kNeeded) {
  if (!file.contains(key)) {
    if (absent == kNeeded) reject_field(key, "is missing");
    return absent;
  }
  const nlohmann::json& field = file[key];
  const nlohmann::json value = field.is_object() ? field.value("value", nlohmann::json()) : nlohmann::json();
  if (!value.is_number_integer())
    reject_field(key, R"(must be of the form {"value": 123, "mark": "S", "source": "…"})");
  const int64_t number =
      value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX ? INT64_MAX : value.get<int64_t>();
  if (number < least) reject_field(key, "is too small: " + value.dump() + ", at least " + std::to_string(least));
  if (number > most) reject_field(key, "is too large: " + value.dump() + ", at most " + std::to_string(most));
  return number;
}

std::string read_text(const nlohmann::json& file, const std::string& key, const std::string& absent) {
  const nlohmann::json value = file.value(key, nlohmann::json(absent));
  if (!value.is_string()) reject_field(key, "must be a text");
  return value.get<std::string>();
}

const Architecture& read_capability(const nlohmann::json& file, Gpu& gpu) {
  const std::string key = "compute_capability";
  if (!file.contains(key)) reject_field(key, "is missing");
  const nlohmann::json value = file[key].is_object() ? file[key].value("value", nlohmann::json()) : nlohmann::json();
  char after = 0;
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  if (std::sscanf(text.c_str(), "%d.%d%c", &gpu.compute_major, &gpu.compute_minor, &after) != 2) {
    reject_field(key, R"(must be of the form {"value": "8.6", "mark": "P", "source": "…"})");
  }
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.major == gpu.compute_major && architecture.minor == gpu.compute_minor) return architecture;
  }
  reject_field(key, "is none that is known: \"" + text + "\"");
}

/// The whole numbers of a file, by the names of their fields. Where a file does not have one, it stays what is usual.
struct NamedNumber {
  const char* key;
  int Gpu::*number;
  int least;
  bool is_needed = false;
};
constexpr NamedNumber kNumbers[] = {{"multiprocessors", &Gpu::multiprocessors, 1, true},
                                    {"l2_bytes", &Gpu::l2_bytes, 0},
                                    {"clock_khz", &Gpu::clock_khz, 0},
                                    {"memory_clock_khz", &Gpu::memory_clock_khz, 0},
                                    {"memory_bus_bits", &Gpu::memory_bus_bits, 0},
                                    {"threads_per_multiprocessor", &Gpu::threads_per_multiprocessor, 32},
                                    {"blocks_per_multiprocessor", &Gpu::blocks_per_multiprocessor, 1},
                                    {"registers_per_multiprocessor", &Gpu::registers_per_multiprocessor, 1},
                                    {"shared_bytes_per_multiprocessor", &Gpu::shared_bytes_per_multiprocessor, 1},
                                    {"shared_bytes_per_block", &Gpu::shared_bytes_per_block, 1},
                                    {"shared_bytes_per_block_optin", &Gpu::shared_bytes_per_block_optin, 1},
                                    {"reserved_shared_bytes_per_block", &Gpu::reserved_shared_bytes_per_block, 0}};

void read_numbers(const nlohmann::json& file, const Architecture& usual, Gpu& gpu) {
  gpu.threads_per_multiprocessor = usual.threads;
  gpu.blocks_per_multiprocessor = usual.blocks;
  gpu.registers_per_multiprocessor = 65536;
  gpu.shared_bytes_per_multiprocessor = usual.shared_bytes;
  gpu.shared_bytes_per_block = 49152;
  gpu.shared_bytes_per_block_optin = usual.shared_bytes_of_block;
  gpu.reserved_shared_bytes_per_block = usual.reserved;
  for (const NamedNumber& named : kNumbers) {
    int& number = gpu.*named.number;
    number = static_cast<int>(
        read_number(file, named.key, named.least, INT32_MAX, named.is_needed ? kNeeded : int64_t{number}));
  }
}

void read_names(const nlohmann::json& file, const std::string& path, Gpu& gpu) {
  gpu.id = read_text(file, "id", std::filesystem::path(path).stem().string());
  if (!file.contains("name")) reject_field("name", "is missing");
  gpu.name = read_text(file, "name", "");
  const nlohmann::json aliases = file.value("aliases", nlohmann::json::array());
  if (!aliases.is_array()) reject_field("aliases", "must be a list of texts");
  for (const nlohmann::json& alias : aliases) {
    if (!alias.is_string()) reject_field("aliases", "must be a list of texts");
    gpu.aliases.push_back(alias.get<std::string>());
  }
}

/// The rates, by the names of their fields: each may be missing, or null.
struct NamedRate {
  const char* key;
  int64_t GpuRates::*rate;
};
constexpr NamedRate kRates[] = {
    {"fp32_flops_per_second", &GpuRates::fp32_flops},     {"tf32_flops_per_second", &GpuRates::tf32_flops},
    {"fp16_flops_per_second", &GpuRates::fp16_flops},     {"bf16_flops_per_second", &GpuRates::bf16_flops},
    {"fp8_flops_per_second", &GpuRates::fp8_flops},       {"int8_flops_per_second", &GpuRates::int8_flops},
    {"memory_bytes_per_second", &GpuRates::memory_bytes}, {"bus_bytes_per_second", &GpuRates::bus_bytes},
    {"nvlink_bytes_per_second", &GpuRates::nvlink_bytes}, {"host_ns_per_operator", &GpuRates::host_ns_per_operator}};

GpuRates read_rates(const nlohmann::json& file) {
  GpuRates rates;
  for (const NamedRate& named : kRates) {
    if (!file.contains(named.key)) continue;
    const nlohmann::json& field = file[named.key];
    if (field.is_object() && field.contains("value") && field["value"].is_null()) continue;
    rates.*named.rate = read_number(file, named.key, 1, INT64_MAX);
  }
  return rates;
}

/// A name that nobody reads is a mistake, of which its author should hear. "measurements" is what else scripts/calibrate
/// saw, for people.
void check_keys(const nlohmann::json& file) {
  constexpr std::string_view kOthers[] = {"schema",
                                          "id",
                                          "aliases",
                                          "name",
                                          "note",
                                          "measurements",
                                          "compute_capability",
                                          "total_bytes",
                                          "older_total_bytes",
                                          "wddm_total_bytes",
                                          "context_bytes",
                                          "first_kernel_bytes"};
  for (const auto& [key, value] : file.items()) {
    const auto is_key = [&name = key](const auto& named) { return name == named.key; };
    const bool is_known = std::ranges::find(kOthers, key) != std::end(kOthers) ||
                          std::ranges::any_of(kNumbers, is_key) || std::ranges::any_of(kRates, is_key);
    if (!is_known) reject_field(key, "is no field of a GPU");
  }
  if (read_text(file, "schema", "oomdiag-device/1") != "oomdiag-device/1")
    reject_field("schema", "is not \"oomdiag-device/1\"");
}

Gpu parse_gpu(const nlohmann::json& file, const std::string& path) {
  constexpr int64_t kLeastBytes = int64_t{256} << 20;
  constexpr int64_t kMaxBytes = int64_t{16} << 40;
  check_keys(file);
  Gpu gpu;
  read_names(file, path, gpu);
  const Architecture& architecture = read_capability(file, gpu);
  const auto read_total = [&](const char* key, int64_t& bytes, std::string& mark) {
    bytes = read_number(file, key, kLeastBytes, kMaxBytes);
    mark = file[key].value("mark", "");
  };
  read_total("total_bytes", gpu.total_bytes, gpu.total_mark);
  if (file.contains("older_total_bytes")) read_total("older_total_bytes", gpu.older_total_bytes, gpu.older_total_mark);
  if (file.contains("wddm_total_bytes")) read_total("wddm_total_bytes", gpu.wddm_total_bytes, gpu.wddm_total_mark);
  gpu.rates = read_rates(file);
  read_numbers(file, architecture, gpu);
  gpu.context_bytes = read_number(file, "context_bytes", 0, gpu.total_bytes);
  gpu.first_kernel_bytes = read_number(file, "first_kernel_bytes", 0, gpu.total_bytes, 0);
  return gpu;
}

struct SizeUnit {
  const char* name;
  int64_t bytes;
};
constexpr std::string_view kWddm = "wddm", kWddmAndHost = "wddm+";
constexpr SizeUnit kUnits[] = {{"GiB", int64_t{1} << 30}, {"MiB", int64_t{1} << 20}, {"KiB", int64_t{1} << 10}};

/// Of host memory; "0" is none of it.
int64_t read_size(std::string_view text) {
  int64_t scale = 1;
  for (const SizeUnit& unit : kUnits) {
    if (!text.ends_with(unit.name)) continue;
    text.remove_suffix(std::strlen(unit.name));
    scale = unit.bytes;
    break;
  }
  constexpr int64_t kMax = int64_t{1} << 44;
  const std::optional<int64_t> number = parse_whole_number(text);
  if (!number || *number < 0 || *number > kMax / scale)
    throw std::invalid_argument("names no size of host memory after wddm+, as in wddm+16GiB");
  return *number * scale;
}

/// 0 when there is none.
int find_newest(const Gpu& gpu, const std::string& architectures) {
  const int own = gpu.compute_major * 10 + gpu.compute_minor;
  int newest = 0;
  std::istringstream list(architectures);
  for (std::string entry; std::getline(list, entry, ',');) {
    const int architecture = std::atoi(entry.c_str());
    const bool runs = architecture / 10 == gpu.compute_major && architecture <= own;
    if (runs && architecture > newest) newest = architecture;
  }
  return newest;
}

}  // namespace

Gpu read_gpu(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error("it cannot be read");
  const nlohmann::json file = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) throw std::runtime_error("it is not a JSON object");
  try {
    return parse_gpu(file, path);
  } catch (const nlohmann::json::exception&) {
    throw std::runtime_error("a field has the wrong type");
  }
}

int cuda_version_of(int driver) {
  struct Branch {
    int driver, cuda;
  };
  constexpr Branch kBranches[] = {{590, 13010}, {580, 13000}, {575, 12090}, {570, 12080}, {565, 12070}, {560, 12060},
                                  {555, 12050}, {550, 12040}, {545, 12030}, {535, 12020}, {530, 12010}, {525, 12000}};
  if (driver > kBranches[0].driver) return 0;
  for (const Branch& branch : kBranches) {
    if (driver >= branch.driver) return branch.cuda;
  }
  return 0;
}

int64_t bytes_of_windows(int64_t total_bytes) { return std::min(int64_t{570} << 20, total_bytes / 8); }

Driver parse_driver(std::string_view text) {
  if (text.empty()) return {};
  if (text == kWddm) return {.is_wddm = true, .host_bytes = kUsualHostBytes};
  if (text.starts_with(kWddmAndHost))
    return {.is_wddm = true, .host_bytes = read_size(text.substr(kWddmAndHost.size()))};
  const int64_t branch = parse_whole_number(text).value_or(0);
  if (branch < kLeastDriver || branch > kMaxDriver)
    throw std::invalid_argument("is no branch of a driver for CUDA 12 or newer");
  return {.branch = static_cast<int>(branch)};
}

std::string to_text(const Driver& driver) {
  if (!driver.is_wddm) return driver.branch == 0 ? "" : std::to_string(driver.branch);
  if (driver.host_bytes == kUsualHostBytes) return std::string(kWddm);
  SizeUnit written{"", 1};
  for (const SizeUnit& unit : kUnits) {
    if (written.bytes == 1 && driver.host_bytes > 0 && driver.host_bytes % unit.bytes == 0) written = unit;
  }
  return std::string(kWddmAndHost) + std::to_string(driver.host_bytes / written.bytes) + written.name;
}

Gpu with_driver(Gpu gpu, const Driver& driver) {
  if (driver.is_wddm && gpu.wddm_total_bytes != 0) {
    gpu.total_bytes = gpu.wddm_total_bytes;
    gpu.total_mark = gpu.wddm_total_mark;
  } else if (driver.branch != 0 && driver.branch <= kOlderDrivers && gpu.older_total_bytes != 0) {
    gpu.total_bytes = gpu.older_total_bytes;
    gpu.total_mark = gpu.older_total_mark;
  }
  return gpu;
}

bool is_linked(const Gpu& gpu) {
  const bool is_data_centre = (gpu.compute_minor == 0 || gpu.compute_major == 10) && gpu.compute_major < 11;
  const bool is_board = gpu.name.find("PCI") != gpu.name.npos || gpu.name.ends_with("A30");
  return is_data_centre && !is_board;
}

bool has_peers(const Gpu& gpu) { return gpu.name.find("GeForce") == gpu.name.npos; }

bool is_integrated(const Gpu& gpu) { return gpu.name == "NVIDIA GB10"; }

bool runs_code_for(const Gpu& gpu, const std::string& architectures) { return find_newest(gpu, architectures) != 0; }

int pick_architecture(const Gpu& gpu, const std::string& architectures) {
  const int newest = find_newest(gpu, architectures);
  return newest != 0 ? newest : gpu.compute_major * 10 + gpu.compute_minor;
}

}  // namespace oomdiag
