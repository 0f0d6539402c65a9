#pragma once

#include <optional>
#include <string>

#include "profiler/report/report.h"

namespace oomdiag {

/// "556" or "8.25" of so many nanoseconds, "-" where they are not known.
std::string milliseconds_text(std::optional<int64_t> ns);

/// The lines "step time" and "work" of the first screen; empty where nothing was metered.
std::string work_text(const Report& report);

/// A table of phases and modules; likewise.
std::string work_table(const Report& report);

}  // namespace oomdiag
