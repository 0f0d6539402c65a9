// Cases about the machine: the host beside the GPU, what no tensor holds, fragmentation, data on its way.

#include <fmt/format.h>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "samples/cases/bytes.h"
#include "samples/cases/case_run.h"
#include "samples/cases/note.h"
#include "samples/cases/notes.h"
#include "samples/cases/scopes.h"

namespace oomdiag {
namespace {

constexpr int64_t kWorthARow = 64 << 10;

}  // namespace

void note_host_and_gpu(Note& note, Runs runs) {
  const CaseRun& gpu = runs.front();
  const CaseRun* host = find_run(runs, "host");
  const bool ran = host != nullptr && host->report.outcome == "ok";
  std::vector<std::pair<std::string, std::vector<int64_t>>> rows;
  for (const Phase of : {Phase::forward, Phase::backward, Phase::optimizer}) {
    const std::string phase(name_of(of));
    const int64_t on_gpu = phase_peak_of(gpu, of);
    const int64_t on_host = ran ? fact_of(*host, "host_" + phase + "_bytes") : -1;
    rows.emplace_back(phase, std::vector{on_gpu == 0 ? -1 : on_gpu, on_host});
    note.figure("gpu." + phase + "_bytes", on_gpu);
    if (ran) note.figure("host." + phase + "_bytes", on_host);
  }
  note.table("peak of tensors by phase", {"GPU", "host"}, rows);
  const ReportOfDevice& device = gpu_of(gpu);
  note.say(
      fmt::format("The GPU has {}. Before the first tensor {} of it are gone to the CUDA context, which the host does "
                  "not have.",
                  with_unit(device.device.total_bytes), with_unit(device.memory.non_pytorch_bytes)));
  if (!ran) return note.say("The loop did not run to its end on the host.");
  note.figure("host.resident_bytes", fact_of(*host, "host_resident_bytes"));
  note.figure("host.total_bytes", fact_of(*host, "host_total_bytes"));
  if (device.failure) {
    note.say(
        fmt::format("The GPU fails in {}: {} more are requested on top of {} allocated and {} cached, and {} are free. "
                    "The host runs "
                    "the same "
                    "loop: its tensors peak at {}, and it has {}, which it hands out page by page as they are touched "
                    "and could swap.",
                    name_of(device.failure->phase), with_unit(device.failure->requested_bytes),
                    with_unit(device.failure->allocated_bytes), with_unit(device.memory.cached_bytes),
                    with_unit(device.memory.free_bytes), with_unit(fact_of(*host, "host_peak_bytes")),
                    with_unit(fact_of(*host, "host_total_bytes"))));
  } else {
    const int64_t largest = device.batch ? device.batch->largest_batch : 0;
    note.figure("gpu.largest_batch", largest);
    note.say(fmt::format("Both run this batch. On the GPU up to {} should fit (predicted).", largest));
  }
}

void note_hidden_memory(Note& note, Runs runs) {
  const CaseRun& run = runs.front();
  const ReportOfDevice& device = gpu_of(run);
  note.say(fmt::format("{}: {}{}.", "CUDA context", with_unit(device.memory.non_pytorch_bytes),
                       device.device.virtual_device ? " (modelled for a virtual GPU)" : ""));
  note.figure("context_bytes", device.memory.non_pytorch_bytes);
  std::vector<std::pair<std::string, std::vector<int64_t>>> rows;
  for (const Transient& one : run.scopes.transients) {
    if (one.most_bytes < kWorthARow) continue;
    rows.emplace_back(one.op + (one.node.empty() ? ", forward" : ", backward"), std::vector{one.most_bytes});
    note.figure(fmt::format("{}.{}_bytes", one.op, one.node.empty() ? "forward" : "backward"), one.most_bytes);
  }
  note.table("largest block that its op alone uses", {"bytes"}, rows);
  note.figure("workspace_bytes", category_of(run, Category::workspace));
  note.figure("temporary_bytes", category_of(run, Category::temporary));
  note.figure("cached_bytes", device.memory.cached_bytes);
  note.say(
      fmt::format("Of these {} are workspaces alive at the peak, and {} temporaries: they come and go, but they set "
                  "it. Cached by the allocator then, which nvidia-smi counts as used: {}.",
                  with_unit(category_of(run, Category::workspace)), with_unit(category_of(run, Category::temporary)),
                  with_unit(device.memory.cached_bytes)));
}

void note_fragmentation(Note& note, Runs runs) {
  const auto reserved = [](const CaseRun& run) { return gpu_of(run).peak.reserved_bytes; };
  note.compare(runs, {{"peak", peak_of}, {"reserved", reserved}});
  for (const CaseRun& run : runs) {
    const ReportOfDevice& device = gpu_of(run);
    if (!device.failure) continue;
    const int64_t idle = device.memory.cached_bytes + device.memory.free_bytes;
    note.figure(run.variant + ".requested_bytes", device.failure->requested_bytes);
    note.figure(run.variant + ".idle_bytes", idle);
    note.say(fmt::format("{}: {} are requested and {} are free, but no free block is large enough.", run.variant,
                         with_unit(device.failure->requested_bytes), with_unit(idle)));
    if (!device.cause || device.cause->blocked_segments.empty()) continue;
    const ReportBlockedSegment& segment = device.cause->blocked_segments.front();
    const std::string by = segment.blocked_by.empty() ? "?" : segment.blocked_by.front().name;
    note.figure(run.variant + ".largest_free_block_bytes", segment.largest_free_block_bytes);
    note.say(fmt::format("The largest free block is {} in a segment of {}, blocked by {} ({}).",
                         with_unit(segment.largest_free_block_bytes), with_unit(segment.bytes), by,
                         with_unit(segment.used_bytes)));
  }
  for (const auto& [variant, what] : {std::pair{"expandable_segments", "PYTORCH_ALLOC_CONF=expandable_segments:True"},
                                      std::pair{"kept_first", "Allocating what is kept before what comes and goes"}}) {
    const CaseRun* run = find_run(runs, variant);
    if (run == nullptr) continue;
    note.say(fmt::format("{} {} (run).", what, run->report.outcome == "ok" ? "cures it" : "does not cure it"));
  }
}

void note_data_loading(Note& note, Runs runs) {
  const auto alive = [](const CaseRun& run) {
    const auto found = run.scopes.most_alive.find("load");
    return found == run.scopes.most_alive.end() ? 0 : found->second;
  };
  const auto pinned = [](const CaseRun& run) { return fact_of(run, "pinned_host_bytes"); };
  note.compare(runs, {{"peak", peak_of}, {"batches", alive}, {"pinned host", pinned}});
  for (const CaseRun& run : runs) {
    const int64_t one = last_call(run, "load").peak_bytes - last_call(run, "load").begin_bytes;
    if (one <= 0) continue;
    note.figure(run.variant + ".batches_in_flight", alive(run) / one);
    note.say(fmt::format("{}: at most {} of {} on the GPU at once; {} of the host's memory pinned.", run.variant,
                         alive(run) / one == 1 ? "1 batch" : fmt::format("{} batches", alive(run) / one),
                         with_unit(one), with_unit(pinned(run))));
  }
  if (gpu_of(runs.front()).device.virtual_device) {
    note.say(
        "On this virtual GPU a copy takes no time, so a pinned buffer is free again at once: a real GPU needs one "
        "for each batch on its way.");
  }
}

}  // namespace oomdiag
