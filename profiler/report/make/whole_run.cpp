#include "profiler/report/make/whole_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/predict_fixes.h"
#include "profiler/explain/reason.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/make/limitations.h"
#include "profiler/report/report.h"
#include "profiler/report/words/cause_text.h"

namespace oomdiag {
namespace {

const ReportOfDevice* find_device(const Report& report, int index) {
  const auto device = std::find_if(report.devices.begin(), report.devices.end(),
                                   [&](const ReportOfDevice& one) { return one.device.index == index; });
  return device == report.devices.end() ? nullptr : &*device;
}

/// What only the failing moment shows: the cure of its reason; and what would pack its segments, where that is the cause.
void keep_fixes_of_the_moment(std::vector<Fix>& fixes, const ReportOfDevice& state, int64_t peak_bytes) {
  const bool is_fragmented = state.cause->kind == CauseKind::fragmentation;
  for (Fix fix : state.fixes) {
    const bool known = std::ranges::find(fixes, fix.id, &Fix::id) != fixes.end();
    const bool packs = is_fragmented && fix.id == "expandable_segments";
    if (known || (!packs && !cures_reason(fix.id))) continue;
    if (packs) fix.predicted_peak_bytes = peak_bytes;
    replace_same(fix, fixes);
    fixes.insert(fixes.begin(), fix);
  }
}

/// That the whole run never ran backward, where that is why so much is kept: at the failing moment one could still come.
std::optional<Reason> find_reason_of_whole_run(const ReportOfDevice& whole) {
  constexpr int64_t kWorthNaming = 3;  // a third of the peak
  const auto fix = std::ranges::find(whole.fixes, std::string("no_grad"), &Fix::id);
  if (fix == whole.fixes.end()) return {};
  const int64_t kept = whole.peak.allocated_bytes - fix->predicted_peak_bytes;
  if (kept * kWorthNaming < whole.peak.allocated_bytes) return {};
  return Reason{.id = "evaluation_keeps_graphs",
                .text = fmt::format("forward passes keep autograd graphs, {} at the peak, and nothing in the whole run "
                                    "runs backward",
                                    with_unit(kept)),
                .bytes = kept,
                .fix = fix->id,
                .how = fix->how};
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
    if (Fix* const same = find_same(fixes, old.id, old.label)) {
      same->measured_peak_bytes = old.measured_peak_bytes;
      same->fits = old.fits;
    } else {
      fixes.push_back(old);
    }
  }
}

}  // namespace

Fix* find_same(std::vector<Fix>& fixes, std::string_view id, std::string_view label) {
  const auto same = std::ranges::find_if(fixes, [&](const Fix& one) { return one.id == id && one.label == label; });
  return same == fixes.end() ? nullptr : &*same;
}

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
  const bool was_fragmented = cause.kind == CauseKind::fragmentation;
  decide_again(cause);
  const bool is_of_size =
      device.besides && device.besides->reason.is_of_pieces();  // what the program holds stands first
  if (was_fragmented && cause.kind != CauseKind::fragmentation && !is_of_size) {
    device.reason = device.besides ? std::optional(device.besides->reason) : std::nullopt;
    if (device.besides) device.fixes = device.besides->fixes;
  }
  device.required_bytes = needed + device.memory.non_pytorch_bytes;
  std::vector<Fix> fixes = seen->fixes;
  keep_fixes_of_the_moment(fixes, device, needed);
  device.fixes = std::move(fixes);
  if (!device.reason) device.reason = find_reason_of_whole_run(*seen);
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
      device.reason = old->reason;
      device.batch = old->batch;
      take_back_no_whole_step(report);
    }
    keep_measured_fixes(device.fixes, old->fixes);
  }
}

}  // namespace oomdiag
