#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "profiler/trace/trace.h"

namespace CLI {
class App;
}

namespace oomdiag {

/// The card that a snapshot was taken on, which does not say so itself. Empty: nobody told.
struct ToldCard {
  std::string device;  ///< as after --device
  std::string memory;  ///< as after --memory

  bool is_told() const { return !device.empty() || !memory.empty(); }
};

/// Adds --device and --memory for commands that read snapshots.
void add_card_options(CLI::App& command, ToldCard& told);

/// Gives the cards of a snapshot their name and size. Throws Error(usage) where the card is not known, or smaller than what
/// the snapshot shows.
void tell_card(const ToldCard& told, Trace& trace);

}  // namespace oomdiag
