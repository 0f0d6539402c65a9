#include "extension/oomdiag.h"

#include "extension/own_report.h"
#include "extension/record/allocator_hooks.h"
#include "extension/record/python.h"
#include "extension/record/session.h"
#include "profiler/error.h"
#include "profiler/report/json.h"
#include "profiler/report/make_report.h"
#include "profiler/report/saved.h"
#include "profiler/report/text.h"

namespace oomdiag {
namespace {

const ReportOfDevice& main_device(const Report& report) {
  if (report.main_device < report.devices.size()) return report.devices[report.main_device];
  throw Error(ErrorKind::usage, "nothing was allocated on a card since recording began");
}

}  // namespace

Trace read_own_trace() {
  if (the_session == nullptr) {
    throw Error(ErrorKind::usage, "nothing is recorded in this process",
                "call start() first, and use CUDA; or run the program by oomdiag run");
  }
  write_memory_stats();
  return read_trace(the_session->trace());
}

Report make_own_report() {
  const std::string folder = the_session == nullptr ? "" : the_session->trace().parent_path().string();
  return make_report(read_own_trace(), {.still_runs = true, .folder = folder});
}

std::map<std::string, int64_t> sum_saved_tensors(const std::vector<ReportSavedTensor>& tensors) {
  std::map<std::string, int64_t> sums;
  for (const ReportSavedTensor& tensor : tensors) sums[label_of(tensor)] += tensor.bytes;
  return sums;
}

std::string start(const std::string& folder) {
  attach_python();
  return start_recording(folder).string();
}

void stop() { stop_recording(); }

void mark(const std::string& name) { write_note(kMark, name.c_str()); }

std::string report() { return to_json(make_own_report()); }

std::string explain() { return to_text(make_own_report()); }

std::map<std::string, int64_t> peak() {
  const Report own = make_own_report();
  const ReportOfDevice& device = main_device(own);
  return {{"allocated_bytes", device.peak.allocated_bytes},
          {"reserved_bytes", device.peak.reserved_bytes},
          {"step", device.peak.step},
          {"device", device.device.index}};
}

std::map<std::string, int64_t> saved_tensors() {
  const Report own = make_own_report();
  return sum_saved_tensors(main_device(own).saved_tensors);
}

}  // namespace oomdiag
