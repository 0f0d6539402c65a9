#pragma once

#include <cstdint>

namespace oomdiag {

/// Flags of a `grouped` event (event.h): what the storage is to its optimizer.
enum GroupRole : uint16_t {
  kGroupedParameter = 512,
  kGroupedGradient = 1024,
  kGroupedState = 2048,
  kGroupedTrained = 4096,  ///< a parameter that wants a gradient
};

}  // namespace oomdiag
