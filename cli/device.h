#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/cards.h"
#include "cli/install.h"

namespace oomdiag {

/// Where a program is to run.
struct DeviceChoice {
  std::optional<CardEntry> card;  ///< the virtual device; none = the real one
  int64_t memory_bytes = 0;       ///< in place of the card's own; 0 = the card's own
  bool by_default = false;        ///< nobody asked for it
};

/// Says on stderr that there is no GPU and which card stands in for it, if nobody chose that card.
void say_default(const DeviceChoice& choice);

/// What --device and --memory say: "real" or "cuda", a name of the catalogue, or a path to a card file. Without
/// --device the real GPU where there is one, else (or if --memory is given) a virtual H200. Throws Error(usage).
DeviceChoice choose_device(const std::string& device, const std::string& memory, const Install& install);

}  // namespace oomdiag
