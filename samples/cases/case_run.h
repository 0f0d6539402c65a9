#pragma once

#include <map>
#include <string>

#include "profiler/report/report.h"
#include "samples/cases/scopes.h"

namespace oomdiag {

/// One run of a sample, with all that a case's note may be made from.
struct CaseRun {
  std::string variant;  ///< of the loop; "host" for a run on the host
  Report report;        ///< without devices for a run on the host
  ScopeSheet scopes;
  std::map<std::string, std::string> facts;  ///< what the program printed of itself: "pinned_host_bytes" → "1048576"
};

}  // namespace oomdiag
