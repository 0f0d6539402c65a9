#pragma once

#include <string>

#include "profiler/report/report.h"

namespace oomdiag {

struct TextOptions {
  bool unicode = true;  ///< arrows and bars; false where the locale is not UTF-8
};

/// The report as people read it in a terminal: where, wanted, cause, who holds the card, what helps, the next command.
/// No colours. At most 100 columns, one unit per table.
std::string to_text(const Report& report, const TextOptions& options = {});

}  // namespace oomdiag
