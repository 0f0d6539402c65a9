#include "profiler/report/whole_run.h"

#include <algorithm>
#include <string_view>

#include "profiler/report/cause_text.h"
#include "profiler/report/limits.h"

namespace oomdiag {
namespace {

const ReportOfDevice* find_device(const Report& report, int index) {
  const auto device = std::find_if(report.devices.begin(), report.devices.end(),
                                   [&](const ReportOfDevice& one) { return one.device.index == index; });
  return device == report.devices.end() ? nullptr : &*device;
}

/// What only the failing moment knows how to predict.
void keep_remedies_of_the_moment(std::vector<Remedy>& remedies, const ReportOfDevice& moment, int64_t peak_bytes) {
  for (Remedy remedy : moment.remedies) {
    const bool known =
        std::any_of(remedies.begin(), remedies.end(), [&](const Remedy& other) { return other.id == remedy.id; });
    if (known || remedy.id != "expandable_segments") continue;
    remedy.predicted_peak_bytes = peak_bytes;
    remedies.insert(remedies.begin(), remedy);
  }
}

bool has_whole_run(const ReportOfDevice& device) {
  return device.cause && device.cause->evidence.complete_run_allocated_bytes;
}

void take_back_no_whole_step(Report& report) {
  std::erase_if(report.limits, [](const std::string& limit) { return limit.ends_with(kNoWholeStep); });
}

void keep_measured_remedies(std::vector<Remedy>& remedies, const std::vector<Remedy>& earlier) {
  for (const Remedy& old : earlier) {
    if (!old.measured_peak_bytes) continue;
    const auto same = std::find_if(remedies.begin(), remedies.end(),
                                   [&](const Remedy& one) { return one.id == old.id && one.label == old.label; });
    if (same == remedies.end()) {
      remedies.push_back(old);
    } else {
      same->measured_peak_bytes = old.measured_peak_bytes;
      same->fits = old.fits;
    }
  }
}

}  // namespace

void take_whole_run(Report& failed, const Report& whole) {
  if (failed.main_device >= failed.devices.size()) return;
  ReportOfDevice& device = failed.devices[failed.main_device];
  const ReportOfDevice* seen = find_device(whole, device.device.index);
  if (seen == nullptr || seen->failure || !device.cause || device.cause->kind == CauseKind::leak ||
      !seen->growth.empty())
    return;
  ReportCause& cause = *device.cause;
  const int64_t needed = seen->peak.allocated_bytes;
  if (is_share_of_card(needed, seen->device.total_bytes)) return;
  FailureFacts& facts = cause.evidence;
  facts.step = {.bytes = needed, .whole = true};
  facts.complete_run_allocated_bytes = needed;
  facts.complete_run_reserved_bytes = seen->peak.reserved_bytes;
  decide_again(cause);
  device.needs_bytes = needed + device.card.outside_pytorch_bytes;
  std::vector<Remedy> remedies = seen->remedies;
  if (cause.kind == CauseKind::fragmentation) keep_remedies_of_the_moment(remedies, device, needed);
  device.remedies = std::move(remedies);
  if (seen->batch) device.batch = seen->batch;
  take_back_no_whole_step(failed);
}

bool is_share_of_card(int64_t peak_bytes, int64_t card_bytes) { return peak_bytes > card_bytes / 16; }

void keep_measured(Report& report, const Report& earlier) {
  for (ReportOfDevice& device : report.devices) {
    const ReportOfDevice* old = find_device(earlier, device.device.index);
    if (old == nullptr || device.failure.has_value() != old->failure.has_value()) continue;
    if (has_whole_run(*old)) {
      device.cause = old->cause;
      device.needs_bytes = old->needs_bytes;
      device.remedies = old->remedies;
      device.batch = old->batch;
      take_back_no_whole_step(report);
    }
    keep_measured_remedies(device.remedies, old->remedies);
  }
}

}  // namespace oomdiag
