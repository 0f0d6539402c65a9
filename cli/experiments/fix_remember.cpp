#include <algorithm>

#include "cli/experiments/fix.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/report/make/whole_run.h"
#include "profiler/report/report.h"

namespace oomdiag {
namespace {

/// Where the report has `measured`, or what it was predicted from: that may be called otherwise, as the cure that stands for it.
Fix* find_measured(std::vector<Fix>& fixes, const std::string& id, const MeasuredFix& measured) {
  if (Fix* const same = find_same(fixes, id, measured.label())) return same;
  const auto found = std::ranges::find_if(fixes, [&](const Fix& one) {
    return (measured.predicted_peak_bytes() && one.id == id) || is_run_as(one.id, id);
  });
  return found == fixes.end() ? nullptr : &*found;
}

/// A fix that the report does not name yet is added to it; a combination has the ids of its parts joined.
void add_measured(std::vector<Fix>& fixes, const MeasuredFix& measured) {
  std::string id;
  for (const Change& change : measured.changes) id += (id.empty() ? "" : "+") + change.id;
  Fix* fix = find_measured(fixes, id, measured);
  if (fix == nullptr) {
    fix = &fixes.emplace_back(Fix{.id = id, .label = measured.label()});
    for (const Change& change : measured.changes) {
      if (measured.changes.size() > 1) fix->ids.push_back(change.id);
      fix->changes_training |= change.changes_numerics && change.changes_batch();
    }
    fix->predicted_peak_bytes = measured.predicted_peak_bytes().value_or(*measured.measured_peak_bytes);
  }
  fix->how = measured.lines;
  fix->measured_peak_bytes = measured.measured_peak_bytes;
  fix->fits = measured.helps();
  fix->postpones_to_step.reset();
}

}  // namespace

void remember(const Fixed& fixed, const std::string& json, const std::filesystem::path& folder) {
  write_whole(json + "\n", folder / kFixFile, 0600);
  Report report = load_report(folder);
  ReportOfDevice* const device = main_device_of(report);
  if (device == nullptr) return;
  if (fixed.whole) take_whole_run(report, *fixed.whole);
  for (const MeasuredFix& one : fixed.fixes) {
    if (one.measured_peak_bytes) add_measured(device->fixes, one);
  }
  keep_json(report, folder);
}

}  // namespace oomdiag
