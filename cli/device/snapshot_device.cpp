#include "cli/device/snapshot_device.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cli/device/cards.h"
#include "cli/python/install.h"
#include "cli/terminal/sizes.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

// Cards that this torch has no code for are as good: nothing is run.
CardEntry find_named(std::string device) {
  const int driver = take_driver(device);
  const std::filesystem::path folder = find_install().cards;
  if (device.ends_with(".json")) return with_driver(read_card_entry(device), driver);
  std::vector<CardEntry> all = read_catalogue(folder);
  for (CardEntry& card : read_unsupported(folder)) {
    if (card.total_bytes > 0) all.push_back(std::move(card));
  }
  return with_driver(find_card(all, device), driver);
}

}  // namespace

void add_snapshot_device_options(CLI::App& command, SnapshotDevice& told) {
  command
      .add_option("--device", told.device,
                  "of a snapshot: the card that it was taken on, a name of oomdiag devices; no snapshot tells it")
      ->type_name("NAME");
  command.add_option("--memory", told.memory, "of a snapshot: the memory of its card, as in 24GiB")->type_name("SIZE");
}

void set_device_of_snapshot(const SnapshotDevice& told, Trace& trace) {
  if (!told.is_given()) return;
  Device card{.name = "unknown model"};
  if (!told.device.empty()) {
    const CardEntry entry = find_named(told.device);
    card.name = entry.name;
    card.total_bytes = entry.total_bytes;
    card.compute_major = entry.capability.major;
    card.compute_minor = entry.capability.minor;
  }
  if (!told.memory.empty()) card.total_bytes = parse_bytes(told.memory);
  for (Device& device : trace.devices) {
    if (device.total_bytes > card.total_bytes) {
      throw Error(ErrorKind::usage,
                  fmt::format("the card of this snapshot has at least {} GiB, and the one that was told {} GiB",
                              to_gib(device.total_bytes), to_gib(card.total_bytes)),
                  "that much was reserved and free at once; give the card that it was taken on");
    }
    device = card;
  }
}

}  // namespace oomdiag
