#pragma once

// The reports on traces, as a library for the recorder (liboomdiag_reports.so). It is the profiler, which knows no torch: built
// once, while the recorder is built for each torch. So nothing crosses this border but C, and it is loaded when a report is
// asked for and not before.

extern "C" {

/// Reads the trace in a file and writes what is asked for: "json" or "text", the report; "peak", "saved_tensors" or
/// "last_walk", a line for each figure, "<number> <name>". The answer belongs to the caller, who gives it back by free().
/// 0, or 1 + oomdiag::ErrorKind: then the answer is the message, and after a line end the hint.
__attribute__((visibility("default"))) int oomdiag_report(const char* trace, const char* what, char** answer);
}

namespace oomdiag {

using ReportFunction = decltype(&oomdiag_report);
inline constexpr const char* kReportsLibrary = "liboomdiag_reports.so";
inline constexpr const char* kReportFunction = "oomdiag_report";

}  // namespace oomdiag
