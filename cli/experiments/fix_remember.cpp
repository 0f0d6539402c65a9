#include <algorithm>

#include "cli/experiments/fix.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"

namespace oomdiag {
namespace {

/// A remedy that the report does not name yet is added to it; a combination has the ids of its parts joined.
void add_measured(std::vector<Remedy>& remedies, const MeasuredFix& measured) {
  std::string id;
  for (const Change& change : measured.changes) id += (id.empty() ? "" : "+") + change.id;
  auto remedy = std::find_if(remedies.begin(), remedies.end(), [&](const Remedy& one) { return one.id == id; });
  if (remedy == remedies.end()) {
    remedy = remedies.insert(remedies.end(), Remedy{.id = id, .label = measured.label()});
    for (const Change& change : measured.changes) {
      if (measured.changes.size() > 1) remedy->ids.push_back(change.id);
      remedy->changes_training |= change.changes_numerics && change.changes_batch;
    }
    remedy->predicted_peak_bytes = measured.predicted_peak_bytes().value_or(*measured.measured_peak_bytes);
  }
  remedy->how = measured.lines;
  remedy->measured_peak_bytes = measured.measured_peak_bytes;
  remedy->fits = measured.fits;
}

}  // namespace

void remember(const Fixed& fixed, const std::string& json, const std::filesystem::path& folder) {
  write_whole(json + "\n", folder / kFixFile, 0600);
  Report report = load_report(folder);
  if (report.main_device >= report.devices.size()) return;
  for (const MeasuredFix& one : fixed.fixes) {
    if (one.measured_peak_bytes) add_measured(report.devices[report.main_device].remedies, one);
  }
  keep_json(report, folder);
}

}  // namespace oomdiag
