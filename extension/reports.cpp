#include "extension/reports.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "profiler/error.h"
#include "profiler/report/json/json.h"
#include "profiler/report/make/make_report.h"
#include "profiler/report/make/saved.h"
#include "profiler/report/report.h"
#include "profiler/report/text/text.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

const ReportOfDevice& main_device(const Report& report) {
  if (report.main_device < report.devices.size()) return report.devices[report.main_device];
  throw Error(ErrorKind::usage, "nothing was allocated on a GPU since recording began");
}

std::string list(const std::map<std::string, int64_t>& figures) {
  std::string lines;
  for (const auto& [name, figure] : figures) lines += std::to_string(figure) + ' ' + name + '\n';
  return lines;
}

std::string list(const std::vector<ReportSavedTensor>& tensors) {
  std::map<std::string, int64_t> sums;
  for (const ReportSavedTensor& tensor : tensors) sums[label_of(tensor)] += tensor.bytes;
  return list(sums);
}

std::string list_peak(const ReportOfDevice& device) {
  return list({{"allocated_bytes", device.peak.allocated_bytes},
               {"reserved_bytes", device.peak.reserved_bytes},
               {"step", device.peak.step},
               {"device", device.device.index}});
}

std::string answer_to(std::string_view what, const std::filesystem::path& file) {
  const Trace trace = read_trace(file);
  if (what == "last_walk") return list(list_last_walk(trace));
  const Report report = make_report(trace, {.still_runs = true, .folder = file.parent_path().string()});
  if (what == "json") return to_json(report);
  if (what == "text") return to_text(report, {.all = true});
  if (what == "peak") return list_peak(main_device(report));
  if (what == "saved_tensors") return list(main_device(report).saved_tensors);
  throw Error(ErrorKind::internal, "no report is called '" + std::string(what) + "'");
}

}  // namespace
}  // namespace oomdiag

int oomdiag_report(const char* trace, const char* what, char** answer) {
  using namespace oomdiag;
  try {
    *answer = strdup(answer_to(what, trace).c_str());
    return 0;
  } catch (const Error& error) {
    *answer = strdup((error.what() + ('\n' + error.hint())).c_str());
    return 1 + static_cast<int>(error.kind());
  } catch (const std::exception& error) {
    *answer = strdup(error.what());
    return 1 + static_cast<int>(ErrorKind::internal);
  }
}
