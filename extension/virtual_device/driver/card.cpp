#include "extension/virtual_device/driver/card.h"

#include <cuda.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

namespace oomdiag {
namespace {

using nlohmann::json;

/// `file[key]["value"]`, at least `least`.
int64_t read_number(const json& file, const char* key, int64_t least) {
  if (!file.contains(key) || !file[key].is_object() || !file[key].value("value", json()).is_number_integer()) {
    throw std::runtime_error(std::string("the card lacks the number \"") + key + "\"");
  }
  const int64_t value = file[key]["value"].get<int64_t>();
  if (value < least) throw std::runtime_error(std::string("the card's \"") + key + "\" is too small");
  return value;
}

int read_int(const json& file, const char* key, int least) {
  const int64_t value = read_number(file, key, least);
  if (value > INT32_MAX) throw std::runtime_error(std::string("the card's \"") + key + "\" is too large");
  return static_cast<int>(value);
}

void read_capability(const json& file, Card& card) {
  const std::string text = file.value("compute_capability", json::object()).value("value", std::string());
  if (std::sscanf(text.c_str(), "%d.%d", &card.compute_major, &card.compute_minor) != 2) {
    throw std::runtime_error("the card's \"compute_capability\" is not of the form \"8.6\"");
  }
}

Card parse_card(const json& file) {
  Card card;
  card.name = file.value("name", std::string("unnamed card"));
  read_capability(file, card);
  card.total_bytes = read_number(file, "total_bytes", 1);
  card.multiprocessors = read_int(file, "multiprocessors", 1);
  card.threads_per_multiprocessor = read_int(file, "threads_per_multiprocessor", 32);
  card.blocks_per_multiprocessor = read_int(file, "blocks_per_multiprocessor", 1);
  card.registers_per_multiprocessor = read_int(file, "registers_per_multiprocessor", 1);
  card.shared_bytes_per_multiprocessor = read_int(file, "shared_bytes_per_multiprocessor", 1);
  card.shared_bytes_per_block = read_int(file, "shared_bytes_per_block", 1);
  card.shared_bytes_per_block_optin = read_int(file, "shared_bytes_per_block_optin", 1);
  card.reserved_shared_bytes_per_block = read_int(file, "reserved_shared_bytes_per_block", 0);
  card.l2_bytes = read_int(file, "l2_bytes", 0);
  card.clock_khz = read_int(file, "clock_khz", 0);
  card.memory_clock_khz = read_int(file, "memory_clock_khz", 0);
  card.memory_bus_bits = read_int(file, "memory_bus_bits", 0);
  card.context_bytes = read_number(file, "context_bytes", 0);
  card.first_kernel_bytes = read_number(file, "first_kernel_bytes", 0);
  return card;
}

}  // namespace

Card read_card(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error("it cannot be read");
  const json file = json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) throw std::runtime_error("it is not a JSON object");
  try {
    return parse_card(file);
  } catch (const json::exception&) {
    throw std::runtime_error("a field has the wrong type");
  }
}

int pick_architecture(const Card& card, const std::string& architectures) {
  const int own = card.compute_major * 10 + card.compute_minor;
  int newest = 0;
  std::istringstream list(architectures);
  for (std::string entry; std::getline(list, entry, ',');) {
    const int architecture = std::atoi(entry.c_str());
    if (architecture <= own && architecture > newest) newest = architecture;
  }
  return newest ? newest : own;
}

std::string describe_for_cudnn(const Card& card) {
  return json{{"deviceVer", card.compute_major * 100 + card.compute_minor * 10},
              {"multiProcessorCount", card.multiprocessors},
              {"warpSize", 32},
              {"maxSharedMemoryPerBlock", card.shared_bytes_per_block},
              {"maxSharedMemoryPerBlockOptin", card.shared_bytes_per_block_optin},
              {"reservedSharedMemoryPerBlock", card.reserved_shared_bytes_per_block},
              {"maxRegistersPerSM", card.registers_per_multiprocessor},
              {"maxCtasPerSM", card.blocks_per_multiprocessor},
              {"maxThreadsPerBlock", 1024},
              {"maxThreadsPerSM", card.threads_per_multiprocessor},
              {"regsPerBlock", 65536},
              {"totalGlobalMem", card.total_bytes},
              {"smClockRateKHz", card.clock_khz},
              {"l2CacheSize", card.l2_bytes},
              {"maxBlockSize", {1024, 1024, 64}},
              {"memClockRateKHz", card.memory_clock_khz},
              {"maxGridSize", {2147483647, 65535, 65535}},
              {"supportCoopLaunch", 1},
              {"pciDeviceId", 0},
              {"isTccDriver", 0},
              {"cudaDeviceId", 0},
              {"driverVer", CUDA_VERSION},
              {"deviceName", card.name}}
      .dump();
}

}  // namespace oomdiag
