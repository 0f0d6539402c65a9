#include "cli/device/rates.h"

#include <algorithm>
#include <vector>

#include "cli/device/cards.h"
#include "cli/python/install.h"

namespace oomdiag {
namespace {

DeviceRates rates_of_card(const CardEntry& entry) {
  const Card& card = entry.card;
  DeviceRates rates{.tf32_flops = card.rates.tf32_flops,
                    .memory_bytes = card.rates.memory_bytes,
                    .bus_bytes = card.rates.bus_bytes,
                    .nvlink_bytes = card.rates.nvlink_bytes,
                    .multiprocessors = card.multiprocessors,
                    .capability_major = entry.capability.major};
  const auto set = [&rates](WorkPrecision precision, int64_t flops) {
    rates.flops[static_cast<size_t>(precision)] = flops;
  };
  set(WorkPrecision::fp32, card.rates.fp32_flops);
  set(WorkPrecision::fp16, card.rates.fp16_flops);
  set(WorkPrecision::bf16, card.rates.bf16_flops);
  set(WorkPrecision::fp8, card.rates.fp8_flops);
  set(WorkPrecision::int8, card.rates.int8_flops);
  return rates;
}

}  // namespace

std::optional<DeviceRates> rates_of_device(std::string_view name, const std::filesystem::path& own) {
  std::error_code ignored;
  if (!own.empty() && std::filesystem::exists(own, ignored)) {
    if (const CardEntry card = read_card_entry(own); card.name == name) return rates_of_card(card);
  }
  const std::filesystem::path folder = find_install().cards;
  for (const auto& cards : {read_catalogue(folder), read_unsupported(folder)}) {
    const auto goes_by = [name](const CardEntry& card) {
      return card.name == name || card.id == name || std::ranges::find(card.aliases, name) != card.aliases.end();
    };
    const auto found = std::ranges::find_if(cards, goes_by);
    if (found != cards.end() && !found->file.empty()) return rates_of_card(*found);
  }
  return std::nullopt;
}

}  // namespace oomdiag
