#include "cli/cards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/nearest.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

/// "a100-40gb" as "a10040gb": what may be typed in several ways.
std::string plain(std::string_view name) {
  std::string result;
  for (const char letter : name) {
    if (letter == '-' || letter == '_' || letter == ' ') continue;
    result += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return result;
}

CardEntry parse(const nlohmann::json& json, const std::filesystem::path& file) {
  const nlohmann::json& total = json.at("total_bytes");
  CardEntry card{.id = json.value("id", file.stem().string()),
                 .name = json.at("name").get<std::string>(),
                 .aliases = json.value("aliases", std::vector<std::string>{}),
                 .total_bytes = total.at("value").get<int64_t>(),
                 .mark = total.value("mark", ""),
                 .compute_capability = json.at("compute_capability").at("value").get<std::string>(),
                 .context_bytes = json.at("context_bytes").at("value").get<int64_t>() +
                                  json.value("first_kernel_bytes", nlohmann::json::object()).value("value", int64_t{0}),
                 .file = file};
  return card;
}

}  // namespace

CardEntry read_card_entry(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) throw Error(ErrorKind::input, fmt::format("cannot read the card '{}'", file.string()));
  try {
    return parse(nlohmann::json::parse(stream), std::filesystem::absolute(file));
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorKind::input, fmt::format("'{}' is not a card: {}", file.string(), error.what()),
                "copy one of extension/virtual_device/cards and change its numbers");
  }
}

std::vector<CardEntry> read_catalogue(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<CardEntry> catalogue;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".json") catalogue.push_back(read_card_entry(entry.path()));
  }
  if (error) {
    throw Error(ErrorKind::environment,
                fmt::format("cannot read the cards in '{}': {}", folder.string(), error.message()),
                "was the checkout moved? build it again: scripts/build");
  }
  std::sort(catalogue.begin(), catalogue.end(), [](const CardEntry& left, const CardEntry& right) {
    return std::pair(left.total_bytes, left.id) < std::pair(right.total_bytes, right.id);
  });
  return catalogue;
}

const CardEntry& find_card(const std::vector<CardEntry>& catalogue, std::string_view wanted) {
  const std::string typed = plain(wanted);
  std::vector<std::string> ids;
  for (const CardEntry& card : catalogue) {
    const auto is_typed = [&](const std::string& name) { return plain(name) == typed; };
    if (is_typed(card.id) || is_typed(card.name) || std::any_of(card.aliases.begin(), card.aliases.end(), is_typed)) {
      return card;
    }
    ids.push_back(card.id);
  }
  throw Error(ErrorKind::usage, fmt::format("unknown device '{}'", wanted),
              did_you_mean(wanted, ids, "oomdiag devices lists them all; ./card.json takes one of your own"));
}

}  // namespace oomdiag
