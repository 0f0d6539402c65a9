#include "extension/oomdiag.h"

#include "extension/own_report.h"
#include "extension/record/python.h"
#include "extension/record/session.h"
#include "profiler/event.h"

namespace oomdiag {

std::string start(const std::string& folder) {
  attach_python();
  return start_recording(folder).string();
}

void stop() { stop_recording(); }

void mark(const std::string& name) { write_note(kMark, name.c_str()); }

std::string report() { return ask_own_report("json"); }

std::string explain() { return ask_own_report("text"); }

std::map<std::string, int64_t> peak() { return ask_own_figures("peak"); }

std::map<std::string, int64_t> saved_tensors() { return ask_own_figures("saved_tensors"); }

}  // namespace oomdiag
