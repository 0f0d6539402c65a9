#pragma once

namespace oomdiag {

struct CuptiGate;

/// From now on the functions of CUPTI that the shim defines go there. Any thread.
void route_cupti(const CuptiGate* gate) noexcept;

}  // namespace oomdiag
