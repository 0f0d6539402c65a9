#include "profiler/report/whole_run.h"

#include <algorithm>
#include <string_view>

#include "profiler/explain/causes.h"
#include "profiler/explain/findings.h"
#include "profiler/report/cause_text.h"
#include "profiler/report/limitations.h"
#include "profiler/report/report.h"

namespace oomdiag {
namespace {

const ReportOfDevice* find_device(const Report& report, int index) {
  const auto device = std::find_if(report.devices.begin(), report.devices.end(),
                                   [&](const ReportOfDevice& one) { return one.device.index == index; });
  return device == report.devices.end() ? nullptr : &*device;
}

/// What only the failing moment knows how to predict.
void keep_fixes_of_the_moment(std::vector<Fix>& fixes, const ReportOfDevice& state, int64_t peak_bytes) {
  for (Fix fix : state.fixes) {
    const bool known = std::any_of(fixes.begin(), fixes.end(), [&](const Fix& other) { return other.id == fix.id; });
    if (known || fix.id != "expandable_segments") continue;
    fix.predicted_peak_bytes = peak_bytes;
    fixes.insert(fixes.begin(), fix);
  }
}

bool has_whole_run(const ReportOfDevice& device) {
  return device.cause && device.cause->evidence.complete_run_allocated_bytes;
}

void take_back_no_whole_step(Report& report) {
  std::erase_if(report.limitations, [](const std::string& limit) { return limit.ends_with(kNoWholeStep); });
}

void keep_measured_fixes(std::vector<Fix>& fixes, const std::vector<Fix>& earlier) {
  for (const Fix& old : earlier) {
    if (!old.measured_peak_bytes) continue;
    const auto same = std::find_if(fixes.begin(), fixes.end(),
                                   [&](const Fix& one) { return one.id == old.id && one.label == old.label; });
    if (same == fixes.end()) {
      fixes.push_back(old);
    } else {
      same->measured_peak_bytes = old.measured_peak_bytes;
      same->fits = old.fits;
    }
  }
}

}  // namespace

void take_whole_run(Report& failed, const Report& whole) {
  if (main_device_of(failed) == nullptr) return;
  ReportOfDevice& device = *main_device_of(failed);
  const ReportOfDevice* seen = find_device(whole, device.device.index);
  if (seen == nullptr || seen->failure || !device.cause || device.cause->kind == CauseKind::leak ||
      !seen->growth.empty())
    return;
  ReportCause& cause = *device.cause;
  const int64_t needed = seen->peak.allocated_bytes;
  if (is_share_of_gpu(needed, seen->device.total_bytes)) return;
  FailureFacts& facts = cause.evidence;
  facts.step = {.bytes = needed, .whole = true};
  facts.complete_run_allocated_bytes = needed;
  facts.complete_run_reserved_bytes = seen->peak.reserved_bytes;
  decide_again(cause);
  device.required_bytes = needed + device.memory.non_pytorch_bytes;
  std::vector<Fix> fixes = seen->fixes;
  if (cause.kind == CauseKind::fragmentation) keep_fixes_of_the_moment(fixes, device, needed);
  device.fixes = std::move(fixes);
  if (seen->batch) device.batch = seen->batch;
  take_back_no_whole_step(failed);
}

bool is_share_of_gpu(int64_t peak_bytes, int64_t gpu_bytes) { return peak_bytes > gpu_bytes / 16; }

void keep_measured(Report& report, const Report& earlier) {
  for (ReportOfDevice& device : report.devices) {
    const ReportOfDevice* old = find_device(earlier, device.device.index);
    if (old == nullptr || device.failure.has_value() != old->failure.has_value()) continue;
    if (has_whole_run(*old)) {
      device.cause = old->cause;
      device.required_bytes = old->required_bytes;
      device.fixes = old->fixes;
      device.batch = old->batch;
      take_back_no_whole_step(report);
    }
    keep_measured_fixes(device.fixes, old->fixes);
  }
}

}  // namespace oomdiag
