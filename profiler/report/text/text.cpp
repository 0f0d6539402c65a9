#include "profiler/report/text/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/evidence/autocast_cache.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/report/text/fixes_table.h"
#include "profiler/report/text/holders_table.h"
#include "profiler/report/text/table.h"
#include "profiler/report/text/text_tables.h"
#include "profiler/report/text/work.h"
#include "profiler/report/words/cause_text.h"
#include "profiler/report/words/place_text.h"
#include "profiler/report/words/printable.h"
#include "profiler/trace/stack_call.h"

namespace oomdiag {
namespace {

constexpr size_t kColumns = 79;

std::string headline(const Report& report, const ReportOfDevice* device) {
  if (device == nullptr && report.unwatched) return "oomdiag: allocations on the GPU could not be recorded";
  if (device == nullptr) return "oomdiag: nothing was allocated on a GPU";
  if (report.snapshot && !device->failure) return "oomdiag: a memory snapshot";
  if (report.snapshot && report.steps == 0) return "oomdiag: out of memory, by a memory snapshot";
  const ReportPeak& peak = device->peak;
  const int code = report.exit_code.value_or(0);
  if (report.outcome == "out_of_memory" && device->failure) {
    return fmt::format("oomdiag: out of memory on cuda:{} {}", device->device.index,
                       moment_text(device->failure->phase, device->failure->step));
  }
  if (report.outcome == "caught") {
    return fmt::format(
        "oomdiag: ran out of memory {}{} on cuda:{}, caught by the program", device->caught_at_least ? "at least " : "",
        device->caught_count == 1 ? "once" : fmt::format("{} times", device->caught_count), device->device.index);
  }
  if (report.outcome == "killed") {
    return code > 128 ? fmt::format("oomdiag: killed by signal {}, step {}", code - 128, report.steps)
                      : fmt::format("oomdiag: ended without a message, step {}", report.steps);
  }
  if (report.outcome == "failed") {
    return fmt::format("oomdiag: failed, exit code {}, step {}", code, report.steps);
  }
  if (report.still_runs) return fmt::format("oomdiag: still runs, step {}", report.steps);
  if (device->out_of_memory_near_step) {
    return fmt::format("oomdiag: fits so far, grows {} per step: out of memory near step {}",
                       with_unit(growth_of(*device)), *device->out_of_memory_near_step);
  }
  if (peak.host_memory_bytes > 0) {
    return fmt::format("oomdiag: does not fit the GPU: Windows' driver keeps {} in host memory, peak {}",
                       with_unit(peak.host_memory_bytes), moment_text(peak.phase, peak.step));
  }
  return fmt::format("oomdiag: {}, peak {}", report.lower_bound ? "fits, as far as is known (lower bound)" : "fits",
                     moment_text(peak.phase, peak.step));
}

std::string gpu_of(const ReportDevice& device, bool snapshot) {
  if (device.name.empty() && device.compute_capability == "0.0") {
    return fmt::format("unknown GPU, {} or more", with_unit(device.total_bytes));
  }
  std::string_view name = device.name.empty() ? "unknown GPU" : std::string_view(device.name);
  for (const std::string_view maker : {"NVIDIA ", "GeForce "}) {
    if (name.starts_with(maker)) name.remove_prefix(maker.size());
  }
  const char* const kind = snapshot ? "" : device.virtual_device ? " (virtual)" : " (real)";
  return fmt::format("{}{}, {}", printable(name, 40), kind, with_unit(device.total_bytes));
}

void add_autocast(std::string& text, const ReportOfDevice& device) {
  if (!device.autocast) return;
  const AutocastUse& autocast = *device.autocast;
  if (autocast.cache_bytes == 0) {
    if (autocast.region_open) add(text, "autocast", printable(autocast.dtype, 20));
    return;
  }
  add(text, "autocast",
      fmt::format("{}: {} are casts of weights, kept until {}", printable(autocast.dtype, 20),
                  with_unit(autocast.cache_bytes),
                  autocast.region_open ? "its region ends" : "backward has used them"));
}

// What the step needs against the one before, which got through.
std::string earlier_of(const ReportOfDevice& device) {
  const ReportFailure& failure = *device.failure;
  int64_t highest = 0, same_phase = 0;
  for (const PhasePeak& phase : device.phases) {
    if (phase.step + 1 != failure.step) continue;
    highest = std::max(highest, phase.allocated_bytes);
    if (phase.phase == failure.phase) same_phase = phase.allocated_bytes;
  }
  if (highest == 0 || failure.step < 2) return {};
  const int64_t needed = failure.allocated_bytes + failure.requested_bytes;
  const std::string most = fmt::format("step {} peaked at {}", failure.step - 1, with_unit(highest));
  if (same_phase == 0) return fmt::format("{}; this one needs {} so far", most, with_unit(needed));
  const int64_t more = needed - same_phase;
  return fmt::format("{}, {} in {}; this one needs {} there, {} {}", most, with_unit(same_phase),
                     name_of(failure.phase), with_unit(needed), with_unit(std::abs(more)), more < 0 ? "less" : "more");
}

// A snapshot may have the phase only: threads of autograd have no Python frames.
std::string where_text(const ReportFailure& failure, const TextOptions& options) {
  const std::string place = place_text(failure, options);
  if (place.empty()) {
    if (failure.stack.empty()) return "not known: no calls were recorded with the request";
    const StackCall call = parse_call(failure.stack.front());
    return fmt::format("outside of any op ← {}() ← {}", call.function, call.short_place());
  }
  return place == "backward" ? "a node of backward; which one, stacks=\"all\" would show" : place;
}

/// "aten::empty_strided": whose tensor it is says more.
bool only_allocates(std::string_view op) {
  return op.starts_with("aten::empty") || op.starts_with("aten::new_empty") || op == "aten::resize_";
}

std::string requested_text(const ReportFailure& failure) {
  std::string what;
  if (!failure.requested_for.empty()) {
    what = ": " + printable(failure.requested_for, 60);
  } else if (!failure.parameter_group.empty()) {
    what = " for " + printable(failure.parameter_group, 60);
  } else if (!failure.inner_op.empty() && failure.inner_op != failure.op && !only_allocates(failure.inner_op)) {
    what = ": inside " + printable(failure.inner_op, 60);
  }
  return with_unit(failure.requested_bytes) + what;
}

/// Between what a complete run on a larger device allocated and what it reserved there, as the allocator gives back what is free before it
/// fails; else a lower bound, where bytes are what is missing.
std::string required_text(const ReportOfDevice& device) {
  const ReportCause& cause = *device.cause;
  if (const auto allocated = cause.evidence.complete_run_allocated_bytes) {
    const int64_t cached = cause.evidence.complete_run_reserved_bytes.value_or(*allocated) - *allocated;
    return required_range(device.required_bytes, cached) + " of GPU memory (measured by a complete run)";
  }
  if (device.required_bytes <= device.device.total_bytes) return {};  // a lower bound that says nothing
  const bool bytes_are_missing = cause.kind == CauseKind::capacity || cause.kind == CauseKind::workspace;
  return bytes_are_missing ? fmt::format("at least {} of GPU memory (predicted)", with_unit(device.required_bytes))
                           : "";
}

// A cache that is meant to grow is no leak. Where the reason is what the program holds, pieces are not what to look at.
std::string why_text(const ReportOfDevice& device) {
  constexpr std::string_view kLeak = "leak: ";
  std::string why = cause_text(*device.cause);
  const bool is_cache = device.reason && device.reason->id == "key_value_cache";
  if (is_cache && why.starts_with(kLeak)) why.replace(0, kLeak.size(), "growth: ");
  const bool is_in_pieces = device.cause->kind == CauseKind::fragmentation;
  if (is_in_pieces && device.reason && !device.reason->is_of_pieces()) {
    const FailureFacts& facts = device.cause->evidence;
    return fmt::format("nearly full: {} are free or cached, in pieces of at most {}",
                       with_unit(facts.free_bytes + facts.cached_bytes),
                       with_unit(std::max(facts.free_bytes, facts.largest_free_block_bytes)));
  }
  return why;
}

void add_failure(std::string& text, const ReportOfDevice& device, const TextOptions& options) {
  const ReportFailure& failure = *device.failure;
  add(text, "where", where_text(failure, options));
  if (options.all) add(text, "called", callers_text(failure, options));
  add(text, "requested", requested_text(failure));
  if (options.all) add(text, "earlier", earlier_of(device));
  if (options.all || keeps_casts(device)) add_autocast(text, device);
  if (!device.cause) return;
  add(text, "why", why_text(device));
  if (device.reason) add(text, "because", printable(device.reason->text, 300));
  if (const Reason* const other = second_reason_of(device)) add(text, "besides", printable(other->text, 300));
  add(text, kept_by_label(device), kept_by_text(device, options));
  add(text, "required", required_text(device));
}

// Without it nobody can say whether others held the GPU, or whether it can ever be enough.
void ask_for_gpu(std::string& text, const Report& report, const ReportOfDevice& device) {
  if (!report.snapshot || !device.device.name.empty() || !device.cause || device.cause->kind != CauseKind::capacity)
    return;
  add(text, "GPU?", "a snapshot does not record it: pass --device NAME or --memory SIZE");
}

void add_peak(std::string& text, const Report& report, const ReportOfDevice& device, const TextOptions& options) {
  constexpr uint32_t kManyStreams = 4;  // one for copies and some for collectives are usual
  const ReportPeak& peak = device.peak;
  const std::string when = report.snapshot && report.steps == 0 ? "" : " " + moment_text(peak.phase, peak.step);
  add(text, "peak",
      fmt::format("{} allocated{}; at most {} reserved", with_unit(peak.allocated_bytes), when,
                  with_unit(peak.reserved_bytes)));
  add(text, "set by", place_text(peak, options));
  const bool streams_matter = peak.streams >= kManyStreams && peak.cached_for_streams_bytes * 4 >= peak.reserved_bytes;
  if (streams_matter)
    add(text, "streams",
        fmt::format("{} are cached for {} streams, each for itself alone: make streams once, and use them again",
                    with_unit(peak.cached_for_streams_bytes), peak.streams));
  if (report.snapshot) return;
  if (options.all || keeps_casts(device)) add_autocast(text, device);
  if (peak.host_memory_bytes > 0) {
    add(text, "slow",
        "kernels reach host memory over the bus; --device NAME@wddm+0 runs out where the GPU is full, and says why");
  } else {
    add(text, "headroom", with_unit(device.headroom_bytes) + " at the peak");
  }
  text += work_text(report);
  if (!device.growth.empty()) add(text, kept_by_label(device), kept_by_text(device, options));
  if (report.outcome == "killed" && !device.timeline.empty()) {
    const ReportPoint& last = device.timeline.back();
    add(text, "at last",
        fmt::format("{} allocated, {} reserved, {:.3f} s after the start", with_unit(last.allocated_bytes),
                    with_unit(last.reserved_bytes), static_cast<double>(last.time_ns) * 1e-9));
  }
  if (device.batch && device.batch->largest_batch > device.batch->batch) {
    add(text, "batch",
        fmt::format("{}{} fits; up to {} should fit (predicted)", device.batch->batch,
                    device.batch->inferred ? " (inferred from tensor shapes)" : "", device.batch->largest_batch));
  }
}

void add_limits(std::string& text, const Report& report) {
  if (report.limitations.empty()) return;
  text += "\n  limitations\n";
  for (const std::string& limit : report.limitations) text += wrapped(limit, 100);
}

// What is worth most now: fixes that are measured after an OOM, the details after a run that fits.
std::string next_command(const Report& report, const TextOptions& options) {
  if (!options.next.empty()) return fmt::format("\n  next: {}\n", options.next);
  const std::string folder = report.folder.empty() ? "FOLDER" : printable(report.folder, 200);
  const bool of_run = !report.snapshot && report.ranks.empty() && !report.folder.empty();
  const bool failed = report.outcome == "out_of_memory" || report.outcome == "caught";
  const std::string more = options.all ? std::string() : fmt::format("   (details: oomdiag explain {} --all)", folder);
  if (of_run && failed && !were_measured(main_device_of(report)->fixes))
    return fmt::format("\n  next: oomdiag fix {}{}\n", folder, more);
  return fmt::format("\n  next: oomdiag explain {} {}\n", folder, options.all ? "--open" : "--all");
}

// Of an allocator that reports nothing only the totals are known.
std::string totals_of(const Report& report, const ReportOfDevice& device, const TextOptions& options) {
  std::string text;
  add(text, "peak",
      fmt::format("{} allocated, {} reserved: the allocator's own totals", with_unit(device.peak.allocated_bytes),
                  with_unit(device.peak.reserved_bytes)));
  add_limits(text, report);
  return text + next_command(report, options);
}

void add_table(std::string& text, const std::string& table) {
  if (!table.empty()) text += "\n" + table;
}

/// What does not fit on the first screen.
std::string details_of(const Report& report, const ReportOfDevice& device, const TextOptions& options) {
  std::string text;
  add_table(text, growth_table(device, options));
  add_table(text, holders_table(device, options));
  add_table(text, lines_table(device));
  add_table(text, pinned_host_memory_table(device));
  add_table(text, groups_table(device));
  add_table(text, ranks_table(report));
  add_table(text, gpus_table(report));
  add_table(text, free_blocks_table(device));
  add_table(text, marks_table(device));
  add_table(text, work_table(report));
  add_table(text, fixes_table(device, options));
  if (report.reference_case) text += "\n" + case_text(*report.reference_case);
  add_limits(text, report);
  return text;
}

constexpr size_t kMaxLines = 24;  ///< of the first screen

size_t count_lines(const std::string& text) { return static_cast<size_t>(std::ranges::count(text, '\n')); }

/// `text` is what stands above; the table of memory gets the lines that are left.
std::string rest_of_first_screen(const Report& report, const ReportOfDevice& device, const std::string& above,
                                 const TextOptions& options) {
  constexpr size_t kFewestRows = 3, kFrame = 4;  // a blank line and a title; a blank line and "next"
  std::string text;
  if (!device.failure) add_table(text, growth_table(device, options));
  add_table(text, ranks_table(report));
  add_table(text, other_fixes_table(device, options));
  const size_t used = count_lines(above) + count_lines(text) + kFrame;
  add_table(text, memory_table(device, std::max(kFewestRows, kMaxLines - std::min(used, kMaxLines)), options));
  if (report.reference_case && !device.failure) text += "\n" + case_text(*report.reference_case);
  return text;
}

std::string compose(const Report& report, const TextOptions& options) {
  const ReportOfDevice* const device = main_device_of(report);
  std::string text = headline(report, device);
  if (device == nullptr) {
    text += "\n";
    if (report.reference_case) text += "\n" + case_text(*report.reference_case);
    add_limits(text, report);
    return text;
  }
  const std::string gpu = gpu_of(device->device, report.snapshot);
  text = padded(text, std::max(text.size() + 2, kColumns - std::min(kColumns, gpu.size()))) + gpu + "\n\n";
  if (report.unwatched) return text + totals_of(report, *device, options);

  if (device->failure) {
    add_failure(text, *device, options);
    ask_for_gpu(text, report, *device);
  } else {
    add_peak(text, report, *device, options);
  }
  const std::string ooms = ooms_text(*device, options), fix = best_fix_text(report, *device, options);
  const std::string next = next_command(report, options);
  if (options.all) return text + ooms + fix + details_of(report, *device, options) + next;
  const auto below = [&](const std::string& above) {
    return above + rest_of_first_screen(report, *device, above, options) + next;
  };
  const std::string screen = below(text + ooms + fix);
  return count_lines(screen) <= kMaxLines ? screen : below(text + fix);  // what a library did without is a detail
}

constexpr size_t kCaseColumns = 92;
constexpr size_t kMaxCharacters = 2000;

}  // namespace

std::string to_text(const Report& report, const TextOptions& options) {
  return printable_lines(compose(report, options), options.unicode);
}

std::string case_text(const ReportCase& reference_case) {
  const std::string id = reference_case.id.empty() ? "" : " " + printable(reference_case.id, 12);
  std::string text = fmt::format("  case{}: {}\n", id, printable(reference_case.about, 80));
  for (const std::string& note : reference_case.notes) {
    const std::string safe = printable(note, kMaxCharacters);
    text += safe.starts_with("  ") ? "  " + safe + "\n" : wrapped(safe, kCaseColumns);
  }
  return text;
}

}  // namespace oomdiag
