#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace oomdiag {

/// What the command line shows of a card; the virtual device reads the rest of the file itself.
struct CardEntry {
  std::string id;    ///< as after --device
  std::string name;  ///< as CUDA gives it
  std::vector<std::string> aliases;
  int64_t total_bytes = 0;         ///< as the CUDA runtime reports it
  std::string mark;                ///< how total_bytes is known: the mark of its source
  std::string compute_capability;  ///< "8.6"
  int64_t context_bytes = 0;       ///< estimate of what a process takes before PyTorch does, first kernel included
  std::filesystem::path file;

  bool operator==(const CardEntry&) const = default;
};

/// Reads one card. Throws Error(input) if it is no card file.
CardEntry read_card_entry(const std::filesystem::path& file);

/// The catalogue, by ascending memory. Throws Error(environment) if `folder` cannot be read.
std::vector<CardEntry> read_catalogue(const std::filesystem::path& folder);

/// The card that goes by `wanted`: id or alias, in any case. Throws Error(usage) that names the nearest.
const CardEntry& find_card(const std::vector<CardEntry>& catalogue, std::string_view wanted);

}  // namespace oomdiag
