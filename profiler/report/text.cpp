#include "profiler/report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "profiler/report/case_text.h"
#include "profiler/report/job_table.h"
#include "profiler/report/table.h"
#include "profiler/report/text_tables.h"

namespace oomdiag {
namespace {

constexpr size_t kColumns = 79;

std::string headline(const Report& report, const ReportOfDevice* device) {
  if (device == nullptr && report.unwatched) return "oomdiag: what was allocated on the card could not be seen";
  if (device == nullptr) return "oomdiag: nothing was allocated on a card";
  if (report.snapshot) {
    return device->failure ? "oomdiag: out of memory, by a memory snapshot" : "oomdiag: a memory snapshot";
  }
  const ReportPeak& peak = device->peak;
  const int code = report.exit_code.value_or(0);
  if (report.outcome == "out_of_memory" && device->failure) {
    return fmt::format("oomdiag: out of memory in {}, step {}", device->failure->phase, device->failure->step);
  }
  if (report.outcome == "killed") {
    return code > 128 ? fmt::format("oomdiag: killed by signal {}, step {}", code - 128, report.steps)
                      : fmt::format("oomdiag: ended without a word, step {}", report.steps);
  }
  if (report.outcome == "failed") {
    return fmt::format("oomdiag: failed, exit code {}, step {}", code, report.steps);
  }
  return fmt::format("oomdiag: fits, peak in {}, step {}", peak.phase, peak.step);
}

std::string card_of(const ReportDevice& device) {
  if (device.name.empty() && device.compute_capability == "0.0") {
    return fmt::format("unknown card, {} or more", with_unit(device.total_bytes));
  }
  std::string_view name = device.name.empty() ? "unknown card" : std::string_view(device.name);
  for (const std::string_view maker : {"NVIDIA ", "GeForce "}) {
    if (name.starts_with(maker)) name.remove_prefix(maker.size());
  }
  return fmt::format("{} ({}), {}", printable(name, 40), device.virtual_device ? "virtual" : "real",
                     with_unit(device.total_bytes));
}

void add(std::string& text, std::string_view label, const std::string& value) {
  if (!value.empty()) text += fmt::format("  {:<8} {}\n", label, value);
}

// "train.py:31" of "/home/me/project/train.py:31"; the JSON has the whole path.
std::string short_source(const std::string& source) { return source.substr(source.rfind('/') + 1); }

template <class Place>
std::string place_of(const Place& place, const TextOptions& options) {
  std::string text;
  for (const std::string& part : {place.node, place.op, place.module, short_source(place.source)}) {
    if (part.empty()) continue;
    text += (text.empty() ? "" : options.unicode ? " ← " : " <- ") + printable(part, 60);
  }
  return text;
}

/// PyTorch's inline functions are compiled into the program itself.
bool is_torch_function(std::string_view name) {
  return name.starts_with("at::") || name.starts_with("c10::") || name.starts_with("torch::") || name == "_start";
}

// The user's calls that led to the line that "where" ends with.
std::string callers_of(const ReportFailure& failure, const TextOptions& options) {
  constexpr size_t kMostCallers = 4;
  std::vector<std::string> callers;
  for (const std::string& call : failure.stack) {
    const size_t in = call.find(" in ");
    const bool is_native = in != call.npos && call.substr(0, in).find("+0x") != call.npos;
    const bool is_library = in == call.npos || call.starts_with("site-packages/") || call.starts_with("torch/lib/") ||
                            call.starts_with("/lib") || call.starts_with("/usr/lib");
    const bool is_said = &call == &failure.stack.front() && !is_native;  // "where" ends with it
    if (is_library || is_said || (is_native && is_torch_function(std::string_view(call).substr(in + 4)))) continue;
    callers.push_back(printable(is_native ? call.substr(in + 4) : short_source(call), 40));
  }
  std::string text;
  for (size_t i = 0; i < std::min(callers.size(), kMostCallers); ++i) {
    text += (i == 0 ? "from " : options.unicode ? " ← " : " <- ") + callers[i];
  }
  return text;
}

// ": libnccl.so.2 2.00 GiB, process 4711 python 0.50 GiB"
std::string largest_holders(const ReportCause& cause) {
  constexpr size_t kMost = 3;
  std::string text;
  for (size_t i = 0; i < cause.holders.size() && i < kMost; ++i) {
    const ReportOutside& holder = cause.holders[i];
    text += fmt::format("{}{} {}", i == 0 ? ": " : ", ", printable(holder.owner, 40), with_unit(holder.bytes));
  }
  return text;
}

std::string cause_of(const ReportOfDevice& device) {
  const ReportCause& cause = *device.cause;
  const ReportCard& card = device.card;
  const auto bytes_of = [&](std::string_view name) {
    const auto found = std::find_if(cause.evidence.begin(), cause.evidence.end(),
                                    [&](const auto& evidence) { return evidence.first == name; });
    return found == cause.evidence.end() ? int64_t{0} : found->second;
  };
  const auto figure = [&](std::string_view name) { return with_unit(bytes_of(name)); };
  const int64_t room = card.allocated_bytes + card.pending_free_bytes + card.cached_bytes + card.free_bytes;
  const std::string short_by = with_unit(cause.short_by_bytes);
  if (cause.kind == "capacity" && cause.short_by_bytes == 0) {
    return fmt::format("capacity: {} left if packed without holes, and the forward pass goes on",
                       figure("left_if_packed_bytes"));
  }
  if (cause.kind == "capacity" && bytes_of("cached_in_other_pools_bytes") > 0) {
    return fmt::format(
        "capacity: short by {}; {} more are cached, but in private pools (MemPool, CUDA graphs), which "
        "serve nobody else",
        short_by, figure("cached_in_other_pools_bytes"));
  }
  if (cause.kind == "capacity" && bytes_of("step_bytes") > room) {
    return fmt::format("capacity: the step needs {}, and there are {}", figure("step_bytes"), with_unit(room));
  }
  if (cause.kind == "capacity" && bytes_of("step_at_least_bytes") > room) {
    return fmt::format("capacity: the step needs at least {}, and there are {}", figure("step_at_least_bytes"),
                       with_unit(room));
  }
  if (cause.kind == "capacity") {
    return fmt::format("capacity: short by {} even if every cached byte could be used", short_by);
  }
  if (cause.kind == "fragmentation") {
    return fmt::format("fragmentation: {} free or cached, largest hole {}; {} left if packed without holes",
                       with_unit(card.free_bytes + card.cached_bytes), figure("largest_hole_bytes"),
                       figure("left_if_packed_bytes"));
  }
  if (cause.kind == "pending_frees") {
    return fmt::format("pending frees: {} are freed but still in use on another stream",
                       with_unit(card.pending_free_bytes));
  }
  if (cause.kind == "outside_pytorch") {
    return fmt::format("outside PyTorch: {} of the card are held by others{}", with_unit(card.outside_pytorch_bytes),
                       largest_holders(cause));
  }
  if (cause.kind == "oversized_request") {
    return fmt::format("oversized request: {} at once is more than this card can ever give", figure("requested_bytes"));
  }
  if (cause.kind == "fraction_cap" && bytes_of("allowed_at_most_bytes") > 0) {
    return fmt::format("fraction cap: the program set a limit of at most {}; the card had room",
                       figure("allowed_at_most_bytes"));
  }
  if (cause.kind == "fraction_cap") {
    return fmt::format("fraction cap: the program may reserve {} only; the card had room", figure("allowed_bytes"));
  }
  if (cause.kind == "workspace") {
    return fmt::format("workspace: a library wanted scratch space; short by {}", short_by);
  }
  if (cause.kind == "leak") {
    const uint32_t last = device.growth.empty() ? 0 : device.growth.front().last_step;
    return fmt::format("leak: {} grew up to the end of step {}, {} per step; without it the request would fit",
                       figure("grown_bytes"), last, figure("bytes_per_step"));
  }
  if (cause.kind == "imbalance") {
    return fmt::format("imbalance: this card holds {}, the others {}; evenly spread it would fit",
                       figure("fullest_bytes"), figure("others_bytes"));
  }
  return printable(cause.kind, 40);
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

void add_failure(std::string& text, const ReportOfDevice& device, const TextOptions& options) {
  const ReportFailure& failure = *device.failure;
  add(text, "where", place_of(failure, options));
  std::string what;
  if (!failure.wanted.empty()) {
    what = ": " + printable(failure.wanted, 60);
  } else if (!failure.parameter_group.empty()) {
    what = " for " + printable(failure.parameter_group, 60);
  } else if (!failure.inner_op.empty() && failure.inner_op != failure.op) {
    what = ": inside " + printable(failure.inner_op, 60);
  }
  add(text, "called", callers_of(failure, options));
  add(text, "wanted", with_unit(failure.requested_bytes) + what);
  add_autocast(text, device);
  if (!device.cause) return;
  add(text, "cause", cause_of(device));
  const Figures& evidence = device.cause->evidence;
  const bool is_measured = std::any_of(evidence.begin(), evidence.end(),
                                       [](const auto& one) { return one.first == "whole_run_allocated_bytes"; });
  if (is_measured) {
    add(text, "needs", fmt::format("{} of card (measured: a whole run with room)", with_unit(device.needs_bytes)));
  } else if (device.cause->kind == "capacity" || device.cause->kind == "workspace") {
    add(text, "needs", fmt::format("at least {} of card to get past this (predicted)", with_unit(device.needs_bytes)));
  }
  if (device.largest) add(text, "largest", largest_of(*device.largest, options));
}

void add_peak(std::string& text, const Report& report, const ReportOfDevice& device, const TextOptions& options) {
  const ReportPeak& peak = device.peak;
  const std::string when = report.snapshot ? "" : fmt::format(" in {}, step {}", peak.phase, peak.step);
  add(text, "peak",
      fmt::format("{} allocated{}; at most {} reserved", with_unit(peak.allocated_bytes), when,
                  with_unit(peak.reserved_bytes)));
  add(text, "set by", place_of(peak, options));
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
        fmt::format("{} fits; up to {} should (predicted)", device.batch->batch, device.batch->largest_batch));
  }
}

// One line for each place: the most that it asked for, and what it got instead of that.
std::vector<ReportAbsorbed> sum_absorbed(const ReportOfDevice& device) {
  std::vector<ReportAbsorbed> sums;
  for (const ReportAbsorbed& one : device.absorbed) {
    const auto same = [&](const ReportAbsorbed& sum) { return sum.op == one.op && sum.node == one.node; };
    const auto sum = std::find_if(sums.begin(), sums.end(), same);
    if (sum == sums.end()) {
      sums.push_back(one);
      continue;
    }
    const int64_t count = sum->count + one.count;
    if (one.requested_bytes > sum->requested_bytes) *sum = one;
    sum->count = count;
  }
  return sums;
}

void add_refusals(std::string& text, const ReportOfDevice& device, const TextOptions& options) {
  for (const ReportAbsorbed& one : sum_absorbed(device)) {
    const std::string& where = !one.node.empty() ? one.node : one.op;
    add(text, "absorbed",
        fmt::format("{} {} inside {}: asked {}, went on {}, which may be slower", one.count,
                    one.count == 1 ? "OOM" : "OOMs", printable(where.empty() ? "a library" : where, 40),
                    with_unit(one.requested_bytes),
                    one.granted_bytes > 0 ? "with " + with_unit(one.granted_bytes) : "without a workspace"));
  }
  for (const ReportOutside& one : device.driver_refusals) {
    add(text, "refused",
        fmt::format("{} that {} asked of the driver itself", with_unit(one.bytes), printable(one.owner, 40)));
  }
  for (const ReportFailure& one : device.caught) {
    const std::string place = place_of(one, options);
    add(text, "caught",
        fmt::format("{} refused in {}, step {}{}{}", with_unit(one.requested_bytes), one.phase, one.step,
                    place.empty() ? "" : ": ", place));
  }
}

void add_limits(std::string& text, const Report& report) {
  if (report.limits.empty()) return;
  text += "\n  what this report does not know\n";
  for (const std::string& limit : report.limits) text += "    " + printable(limit, 240) + "\n";
}

std::string next_command(const Report& report) {
  const std::string folder = report.folder.empty() ? "FOLDER" : printable(report.folder, 200);
  return fmt::format("\n  next: oomdiag explain {} --json\n", folder);
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

}  // namespace

std::string to_text(const Report& report, const TextOptions& options) {
  const bool used = report.main_device < report.devices.size();
  const ReportOfDevice* device = used ? &report.devices[report.main_device] : nullptr;
  std::string text = headline(report, device);
  if (device == nullptr) {
    text += "\n";
    if (report.reference_case) text += "\n" + case_text(*report.reference_case);
    add_limits(text, report);
    return text;
  }
  const std::string card = card_of(device->device);
  text = padded(text, std::max(text.size() + 2, kColumns - std::min(kColumns, card.size()))) + card + "\n\n";
  if (report.unwatched) return text + totals_of(report, *device);

  if (device->failure) {
    add_failure(text, *device, options);
  } else {
    add_peak(text, report, *device, options);
  }
  add_refusals(text, *device, options);
  if (const std::string growth = growth_table(*device, options); !growth.empty()) text += "\n" + growth;
  text += "\n" + holders_table(*device, options);
  if (const std::string groups = groups_table(*device); !groups.empty()) text += "\n" + groups;
  if (const std::string ranks = ranks_table(report); !ranks.empty()) text += "\n" + ranks;
  if (const std::string holes = holes_table(*device, options); !holes.empty()) text += "\n" + holes;
  if (const std::string marks = marks_table(*device); !marks.empty()) text += "\n" + marks;
  if (const std::string remedies = remedies_table(*device); device->failure && !remedies.empty())
    text += "\n" + remedies;
  if (report.reference_case) text += "\n" + case_text(*report.reference_case);
  add_limits(text, report);
  if (used) text += next_command(report);
  return text;
}

}  // namespace oomdiag
