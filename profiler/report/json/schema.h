#pragma once

#include <string>

// What report.h says of a report's JSON, for those who read it elsewhere.
namespace oomdiag {

/// The JSON schema of oomdiag-report/1, indented, with a newline at its end.
std::string report_schema();

/// The same as a page of Markdown: a section for each object.
std::string report_schema_page();

}  // namespace oomdiag
