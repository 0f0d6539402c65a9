#pragma once

#include <string>
#include <vector>

#include "profiler/report/report.h"

namespace oomdiag {

/// The report for sharing: of paths the last part, of the command line the program, and in the place of each of
/// `secrets` (names of users and machines) "...". Names of modules, operators and shapes stay: they are what it is
/// about.
Report redact(const Report& report, const std::vector<std::string>& secrets);

}  // namespace oomdiag
