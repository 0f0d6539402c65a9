#include "cli/device/cards.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "cli/terminal/nearest.h"
#include "extension/environment.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

// OOMDIAG_ARCHITECTURES comes from cli/CMakeLists.txt: "75,80,86,…".
std::string architectures() {
  const char* const own = std::getenv(variables::kArchitectures);
  return own == nullptr || *own == '\0' ? OOMDIAG_ARCHITECTURES : own;
}

/// "7.5, 8.0 and 12.0" of "75,80,120".
std::string list_capabilities() {
  std::vector<std::string> capabilities;
  std::istringstream list(architectures());
  for (std::string entry; std::getline(list, entry, ',');) {
    if (entry.size() > 1) capabilities.push_back(entry.insert(entry.size() - 1, "."));
  }
  if (capabilities.size() < 2) return fmt::format("{}", fmt::join(capabilities, ""));
  const std::string last = capabilities.back();
  capabilities.pop_back();
  return fmt::format("{} and {}", fmt::join(capabilities, ", "), last);
}

std::string explain_no_code(ComputeCapability capability) {
  return fmt::format("its compute capability is {}, and this torch has code for {}", capability.text(),
                     list_capabilities());
}

/// Of "8.6"; 0.0 if it is none.
ComputeCapability read_capability(const std::string& text) {
  ComputeCapability capability;
  const char* const end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, capability.major);
  if (major.ptr != end) std::from_chars(major.ptr + 1, end, capability.minor);
  return capability;
}

CardEntry describe(const Card& card, const std::filesystem::path& file) {
  const ComputeCapability capability{card.compute_major, card.compute_minor};
  return {.id = card.id,
          .name = card.name,
          .aliases = card.aliases,
          .total_bytes = card.total_bytes,
          .mark = card.total_mark,
          .capability = capability,
          .context_bytes = card.context_bytes + card.first_kernel_bytes,
          .why_not = runs_code_for(card, architectures()) ? "" : explain_no_code(capability),
          .file = file,
          .card = card};
}

std::vector<CardEntry> read_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<CardEntry> cards;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".json") cards.push_back(read_card_entry(entry.path()));
  }
  if (error) {
    throw Error(ErrorKind::environment,
                fmt::format("cannot read the cards in '{}': {}", folder.string(), error.message()),
                "was the checkout moved? build it again: scripts/build");
  }
  std::sort(cards.begin(), cards.end(), [](const CardEntry& left, const CardEntry& right) {
    return std::pair(left.total_bytes, left.id) < std::pair(right.total_bytes, right.id);
  });
  return cards;
}

bool goes_by(const CardEntry& card, const std::string& typed) {
  const auto is_typed = [&](const std::string& name) { return plain_name(name) == typed; };
  return is_typed(card.id) || is_typed(card.name) || std::any_of(card.aliases.begin(), card.aliases.end(), is_typed);
}

Error refuse(const CardEntry& card) {
  const std::string called = card.file.empty() ? card.name : fmt::format("{}, {}", card.id, card.name);
  return {ErrorKind::usage, fmt::format("no virtual {}: {}", called, card.why_not),
          "oomdiag devices lists the cards that it runs on"};
}

}  // namespace

std::string ComputeCapability::text() const { return fmt::format("{}.{}", major, minor); }

CardEntry read_card_entry(const std::filesystem::path& file) {
  try {
    return describe(read_card(file.string()), std::filesystem::absolute(file));
  } catch (const std::runtime_error& error) {
    throw Error(ErrorKind::input, fmt::format("'{}' is not a card: {}", file.string(), error.what()),
                "copy one of extension/virtual_device/cards and change its numbers");
  }
}

std::vector<CardEntry> read_catalogue(const std::filesystem::path& folder) {
  std::vector<CardEntry> cards = read_folder(folder);
  std::erase_if(cards, [](const CardEntry& card) { return !card.why_not.empty(); });
  return cards;
}

std::vector<CardEntry> read_unsupported(const std::filesystem::path& folder) {
  std::vector<CardEntry> cards = read_folder(folder);
  std::erase_if(cards, [](const CardEntry& card) { return card.why_not.empty(); });
  std::ifstream stream(folder.parent_path() / "cards_without_profile.json");
  const nlohmann::json others = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!others.is_array()) return cards;  // a folder of somebody's own, which has none
  for (const nlohmann::json& json : others) {
    const ComputeCapability capability = read_capability(json.at("compute_capability"));
    CardEntry card;
    card.id = json.at("id");
    card.name = json.at("name");
    card.capability = capability;
    card.why_not = json.value("why", explain_no_code(capability));
    cards.push_back(std::move(card));
  }
  return cards;
}

const CardEntry& find_card(const std::vector<CardEntry>& catalogue, std::string_view wanted) {
  const std::string typed = plain_name(wanted);
  std::vector<std::string> ids;
  for (const CardEntry& card : catalogue) {
    if (goes_by(card, typed)) return card;
    ids.push_back(card.id);
  }
  throw Error(ErrorKind::usage, fmt::format("unknown device '{}'", wanted),
              did_you_mean(wanted, ids, "oomdiag devices lists them all; ./card.json takes one of your own"));
}

int take_driver(std::string& device) {
  const std::size_t at = device.rfind('@');
  if (at == std::string::npos || device.find('/', at) != std::string::npos) return 0;
  const std::string text = device.substr(at + 1);
  const bool is_number =
      text.size() == 3 && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); });
  if (!is_number || std::stoi(text) < kLeastDriver) {
    throw Error(ErrorKind::usage,
                fmt::format("--device {}: '{}' is no branch of a driver for CUDA 12 or newer", device, text),
                fmt::format("valid: {} to {}, as nvidia-smi has it before the first point", kLeastDriver, kMaxDriver));
  }
  device.resize(at);
  return std::stoi(text);
}

CardEntry with_driver(CardEntry card, int driver) {
  if (driver == 0) return card;
  card.driver = driver;
  card.card = with_driver(std::move(card.card), driver);
  card.total_bytes = card.card.total_bytes;
  card.mark = card.card.total_mark;
  card.id += fmt::format("@{}", driver);
  return card;
}

CardEntry choose_card(const std::filesystem::path& folder, const std::string& wanted) {
  std::string device = wanted;
  const int driver = take_driver(device);
  if (device.find('/') != std::string::npos || device.ends_with(".json")) {
    const CardEntry own = read_card_entry(device);
    if (!own.why_not.empty()) throw refuse(own);
    return with_driver(own, driver);
  }
  for (const CardEntry& card : read_unsupported(folder)) {
    if (goes_by(card, plain_name(device))) throw refuse(card);
  }
  return with_driver(find_card(read_catalogue(folder), device), driver);
}

}  // namespace oomdiag
