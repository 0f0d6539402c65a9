#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "profiler/report/report.h"

namespace oomdiag {

/// The report as JSON, schema oomdiag-report/1. With `indent` ≥ 0 over several lines.
std::string to_json(const Report& report, int indent = 2);

/// Reads what to_json wrote, by this or a later oomdiag of the same schema: names that are not known are passed over.
/// Throws Error(input) for anything else: no JSON, another schema, a value of the wrong kind.
Report from_json(std::string_view text);

/// The report for sharing: of paths the last part, of the command line the program, and in the place of each of
/// `secrets` (names of users and machines) "...". Names of modules, operators and shapes stay: they are what it is
/// about.
Report redact(const Report& report, const std::vector<std::string>& secrets);

}  // namespace oomdiag
