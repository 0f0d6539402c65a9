#pragma once

#include <string>

#include "profiler/report/report.h"

namespace oomdiag {

struct TextOptions {
  bool unicode = true;  ///< arrows and bars; false where the locale is not UTF-8
  bool all = false;     ///< every table; else the first screen, at most 24 lines
  std::string next{};   ///< the command to go on with, where it is none about the report
};

/// The report as people read it in a terminal. The first screen answers: where, requested, why, kept by, the best fix, at most
/// three others, GPU memory, the next command. No colours. At most 100 columns but for code and causes, one unit per table.
std::string to_text(const Report& report, const TextOptions& options = {});

}  // namespace oomdiag
