#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/cards.h"
#include "cli/commands.h"
#include "cli/help.h"
#include "cli/install.h"
#include "cli/sizes.h"

namespace oomdiag {
namespace {

nlohmann::json to_json(const CardEntry& card) {
  return {{"id", card.id},
          {"name", card.name},
          {"aliases", card.aliases},
          {"total_bytes", card.total_bytes},
          {"mark", card.mark},
          {"compute_capability", card.compute_capability},
          {"context_bytes", card.context_bytes},
          {"file", card.file.string()}};
}

/// The marks of the card files: how a number is known.
std::string_view explain_mark(std::string_view mark) {
  if (mark == "S") return "seen on a card";
  if (mark == "C") return "from a rounded figure";
  if (mark == "P") return "specification";
  if (mark == "U") return "uncertain";
  return mark;
}

int print_json(const std::vector<CardEntry>& catalogue) {
  nlohmann::json list = nlohmann::json::array();
  for (const CardEntry& card : catalogue) list.push_back(to_json(card));
  fmt::print("{}\n", list.dump(2));
  return 0;
}

int print_table(const std::vector<CardEntry>& catalogue) {
  fmt::print("{:<10} {:<25} {:>11} {:>13} {:>8}  {}\n", "device", "name", "memory, GiB", "context, GiB", "compute",
             "memory is");
  for (const CardEntry& card : catalogue) {
    fmt::print("{:<10} {:<25} {:>11} {:>13} {:>8}  {}\n", card.id, card.name, to_gib(card.total_bytes),
               to_gib(card.context_bytes), card.compute_capability, explain_mark(card.mark));
  }
  fmt::print(
      "\nmemory: as the CUDA runtime reports it; context: what a process takes of it before PyTorch does, estimated\n");
  fmt::print("next: oomdiag train --model deepcnn --device rtx3060\n");
  return 0;
}

}  // namespace

void add_devices(CLI::App& app, Command& chosen) {
  auto as_json = std::make_shared<bool>(false);
  CLI::App& command = *app.add_subcommand("devices", "list the virtual devices");
  set_help(command, {.example = "oomdiag devices",
                     .about = "Lists the cards that a virtual device can be: what --device takes.",
                     .usage = "oomdiag devices [OPTIONS]"});
  command.add_flag("--json", *as_json, "print JSON");
  command.callback([as_json, &chosen] {
    chosen = [as_json] {
      const std::vector<CardEntry> catalogue = read_catalogue(find_install().cards);
      return *as_json ? print_json(catalogue) : print_table(catalogue);
    };
  });
}

}  // namespace oomdiag
