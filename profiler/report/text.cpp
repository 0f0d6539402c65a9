#include "profiler/report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "profiler/report/case_text.h"
#include "profiler/report/cause_text.h"
#include "profiler/report/holders_table.h"
#include "profiler/report/job_table.h"
#include "profiler/report/place_text.h"
#include "profiler/report/remedies_table.h"
#include "profiler/report/table.h"
#include "profiler/report/text_tables.h"

namespace oomdiag {
namespace {

constexpr size_t kColumns = 79;

std::string headline(const Report& report, const ReportOfDevice* device) {
  if (device == nullptr && report.unwatched) return "oomdiag: what was allocated on the card could not be seen";
  if (device == nullptr) return "oomdiag: nothing was allocated on a card";
  if (report.snapshot && !device->failure) return "oomdiag: a memory snapshot";
  if (report.snapshot && report.steps == 0) return "oomdiag: out of memory, by a memory snapshot";
  const ReportPeak& peak = device->peak;
  const int code = report.exit_code.value_or(0);
  if (report.outcome == "out_of_memory" && device->failure) {
    return fmt::format("oomdiag: out of memory in {}, step {}", name_of(device->failure->phase), device->failure->step);
  }
  if (report.outcome == "killed") {
    return code > 128 ? fmt::format("oomdiag: killed by signal {}, step {}", code - 128, report.steps)
                      : fmt::format("oomdiag: ended without a word, step {}", report.steps);
  }
  if (report.outcome == "failed") {
    return fmt::format("oomdiag: failed, exit code {}, step {}", code, report.steps);
  }
  if (report.still_runs) return fmt::format("oomdiag: still runs, step {}", report.steps);
  return fmt::format("oomdiag: {}, peak in {}, step {}",
                     report.lower_bound ? "fits, as far as is known (lower bound)" : "fits", name_of(peak.phase),
                     peak.step);
}

std::string card_of(const ReportDevice& device, bool snapshot) {
  if (device.name.empty() && device.compute_capability == "0.0") {
    return fmt::format("unknown card, {} or more", with_unit(device.total_bytes));
  }
  std::string_view name = device.name.empty() ? "unknown card" : std::string_view(device.name);
  for (const std::string_view maker : {"NVIDIA ", "GeForce "}) {
    if (name.starts_with(maker)) name.remove_prefix(maker.size());
  }
  const char* const kind = snapshot ? "" : device.virtual_device ? " (virtual)" : " (real)";
  return fmt::format("{}{}, {}", printable(name, 40), kind, with_unit(device.total_bytes));
}

// "relu1, 3.32 GiB: autograd keeps it until ReluBackward0 ← relu1 has run".
std::string largest_of(const ReportLifetime& life, const TextOptions& options) {
  if (life.freed_by_node.empty()) return {};
  const char* const arrow = options.unicode ? " ← " : " <- ";
  const std::string by = life.freed_by_module.empty() ? "" : arrow + printable(life.freed_by_module, 40);
  return fmt::format("{}, {}: autograd keeps it until {}{} has run", printable(life.name, 40), with_unit(life.bytes),
                     printable(life.freed_by_node, 40), by);
}

void add_autocast(std::string& text, const ReportOfDevice& device) {
  if (!device.autocast) return;
  const ReportAutocast& autocast = *device.autocast;
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
  const int64_t wanted = failure.allocated_bytes + failure.requested_bytes;
  const std::string most = fmt::format("step {} peaked at {}", failure.step - 1, with_unit(highest));
  if (same_phase == 0) return fmt::format("{}; this one wanted {} so far", most, with_unit(wanted));
  const int64_t more = wanted - same_phase;
  return fmt::format("{}, {} in {}; this one wanted {} there, {} {}", most, with_unit(same_phase),
                     name_of(failure.phase), with_unit(wanted), with_unit(std::abs(more)), more < 0 ? "less" : "more");
}

// A snapshot may tell the phase only: threads of autograd have no Python frames.
std::string where_text(const ReportFailure& failure, const TextOptions& options) {
  const std::string place = place_text(failure, options);
  if (place.empty()) return "not known: no calls were recorded with the request";
  return place == "backward" ? "a node of backward; which one, stacks=\"all\" would tell" : place;
}

void add_failure(std::string& text, const ReportOfDevice& device, const TextOptions& options) {
  const ReportFailure& failure = *device.failure;
  add(text, "where", where_text(failure, options));
  std::string what;
  if (!failure.wanted.empty()) {
    what = ": " + printable(failure.wanted, 60);
  } else if (!failure.parameter_group.empty()) {
    what = " for " + printable(failure.parameter_group, 60);
  } else if (!failure.inner_op.empty() && failure.inner_op != failure.op) {
    what = ": inside " + printable(failure.inner_op, 60);
  }
  add(text, "called", callers_text(failure, options));
  add(text, "wanted", with_unit(failure.requested_bytes) + what);
  add(text, "earlier", earlier_of(device));
  add_autocast(text, device);
  if (!device.cause) return;
  add(text, "cause", cause_text(*device.cause));
  if (device.cause->evidence.complete_run_allocated_bytes) {
    add(text, "needs", fmt::format("{} of card (measured: a whole run with room)", with_unit(device.needs_bytes)));
  } else if (device.cause->kind == CauseKind::capacity || device.cause->kind == CauseKind::workspace) {
    add(text, "needs", fmt::format("at least {} of card to get past this (predicted)", with_unit(device.needs_bytes)));
  }
  if (device.largest) add(text, "largest", largest_of(*device.largest, options));
}

// Without it nobody can say whether others held the card, or whether it can ever be enough.
void ask_for_card(std::string& text, const Report& report, const ReportOfDevice& device) {
  if (!report.snapshot || !device.device.name.empty() || !device.cause || device.cause->kind != CauseKind::capacity)
    return;
  add(text, "card?", "a snapshot does not tell its size: --device NAME or --memory SIZE would say more");
}

void add_peak(std::string& text, const Report& report, const ReportOfDevice& device, const TextOptions& options) {
  const ReportPeak& peak = device.peak;
  const std::string when =
      report.snapshot && report.steps == 0 ? "" : fmt::format(" in {}, step {}", name_of(peak.phase), peak.step);
  add(text, "peak",
      fmt::format("{} allocated{}; at most {} reserved", with_unit(peak.allocated_bytes), when,
                  with_unit(peak.reserved_bytes)));
  add(text, "set by", place_text(peak, options));
  if (report.snapshot) return;
  add_autocast(text, device);
  add(text, "room", fmt::format("{} more could be allocated at the peak", with_unit(device.headroom_bytes)));
  if (report.outcome == "killed" && !device.timeline.empty()) {
    const ReportPoint& last = device.timeline.back();
    add(text, "at last",
        fmt::format("{} allocated, {} reserved, {:.3f} s after the start", with_unit(last.allocated_bytes),
                    with_unit(last.reserved_bytes), static_cast<double>(last.time_ns) * 1e-9));
  }
  if (device.batch && device.batch->largest_batch > device.batch->batch) {
    add(text, "batch",
        fmt::format("{}{} fits; up to {} should (predicted)", device.batch->batch,
                    device.batch->inferred ? " (as the shapes of tensors tell)" : "", device.batch->largest_batch));
  }
}

void add_limits(std::string& text, const Report& report) {
  if (report.limits.empty()) return;
  text += "\n  what this report does not know\n";
  for (const std::string& limit : report.limits) text += wrapped(limit, 100);
}

// What is worth most now: remedies that are run after an OOM, how far it goes after a run that fits.
std::string next_command(const Report& report) {
  const std::string folder = report.folder.empty() ? "FOLDER" : printable(report.folder, 200);
  const bool of_run = !report.snapshot && report.ranks.empty() && !report.folder.empty();
  if (of_run && report.outcome == "out_of_memory") return fmt::format("\n  next: oomdiag fix {}\n", folder);
  return fmt::format("\n  next: oomdiag explain {} --open\n", folder);
}

// Of an allocator that tells nothing only the totals are known.
std::string totals_of(const Report& report, const ReportOfDevice& device) {
  std::string text;
  add(text, "peak",
      fmt::format("{} allocated, {} reserved: the allocator's own totals", with_unit(device.peak.allocated_bytes),
                  with_unit(device.peak.reserved_bytes)));
  add_limits(text, report);
  return text + next_command(report);
}

std::string compose(const Report& report, const TextOptions& options) {
  const bool used = report.main_device < report.devices.size();
  const ReportOfDevice* device = used ? &report.devices[report.main_device] : nullptr;
  std::string text = headline(report, device);
  if (device == nullptr) {
    text += "\n";
    if (report.reference_case) text += "\n" + case_text(*report.reference_case);
    add_limits(text, report);
    return text;
  }
  const std::string card = card_of(device->device, report.snapshot);
  text = padded(text, std::max(text.size() + 2, kColumns - std::min(kColumns, card.size()))) + card + "\n\n";
  if (report.unwatched) return text + totals_of(report, *device);

  if (device->failure) {
    add_failure(text, *device, options);
    ask_for_card(text, report, *device);
  } else {
    add_peak(text, report, *device, options);
  }
  text += refusals_text(*device, options);
  if (const std::string growth = growth_table(*device, options); !growth.empty()) text += "\n" + growth;
  text += "\n" + holders_table(*device, options);
  if (const std::string lines = lines_table(*device); !lines.empty()) text += "\n" + lines;
  if (const std::string host = page_locked_table(*device); !host.empty()) text += "\n" + host;
  if (const std::string groups = groups_table(*device); !groups.empty()) text += "\n" + groups;
  if (const std::string ranks = ranks_table(report); !ranks.empty()) text += "\n" + ranks;
  if (const std::string cards = cards_table(report); !cards.empty()) text += "\n" + cards;
  if (const std::string holes = holes_table(*device); !holes.empty()) text += "\n" + holes;
  if (const std::string marks = marks_table(*device); !marks.empty()) text += "\n" + marks;
  if (const std::string remedies = remedies_table(*device, options); !remedies.empty()) text += "\n" + remedies;
  if (report.reference_case) text += "\n" + case_text(*report.reference_case);
  add_limits(text, report);
  if (used) text += next_command(report);
  return text;
}

}  // namespace

std::string to_text(const Report& report, const TextOptions& options) {
  return printable_lines(compose(report, options), options.unicode);
}

}  // namespace oomdiag
