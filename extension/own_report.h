#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace oomdiag {

/// What the reports library (reports.h) says of the trace of this process as far as it is written. Throws Error(usage) if there
/// is none, Error(environment) if the library is not there, and its errors.
std::string ask_own_report(const char* what);

/// The same of what is answered in figures, by name.
std::map<std::string, int64_t> ask_own_figures(const char* what);

}  // namespace oomdiag
