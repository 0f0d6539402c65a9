#include "profiler/report/make/limitations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <string_view>

#include "profiler/counted.h"
#include "profiler/event.h"
#include "profiler/explain/causes/library_names.h"
#include "profiler/explain/step/whole_step.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/report/make/device_reads.h"
#include "profiler/report/make/gpu_report.h"
#include "profiler/report/make/make_report.h"
#include "profiler/trace/format.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

void add_losses(const Trace& trace, bool still_runs, std::vector<std::string>& limitations) {
  if (trace.overwritten_events > 0) {
    const bool counted = !trace.step_ends.empty();
    const uint32_t step = counted ? trace.step_of(trace.overwritten_events + 1) : 0;
    const std::string what = counted ? fmt::format("peaks and phases are known from step {} on", step)
                                     : "steps are counted from where the trace begins";
    limitations.push_back(fmt::format("the oldest {} events were overwritten: {}", trace.overwritten_events, what));
    if (counted && trace.step_stride > 1) {
      limitations.push_back(fmt::format("steps are counted to within {}", trace.step_stride));
    }
  }
  const auto add = [&](uint64_t count, std::string_view what) {
    if (count > 0) limitations.push_back(fmt::format("{} {}", count, what));
  };
  add(trace.dropped_events, "events were lost");
  add(trace.events.lost(),
      "events were overwritten or cut off while they were read: peaks and categories may be wrong");
  add(trace.dropped_blocks, "live blocks did not fit into the table of live blocks");
  add(trace.dropped_names, "names or places did not fit into the trace: what they would name is not named");
  add(trace.dropped_driver, "allocations by libraries outside of PyTorch did not fit into the tracking table");
  add(trace.deep_calls, "ops ran too deep inside of others: what they allocated is counted for an op around them");
  add(trace.unnumbered_threads,
      "threads began after 65,534 others: which forward op made their autograd nodes is not known");
  add(trace.folded_names, "scopes and marks that differ by numbers only are listed together, with # for the number");
  if (!trace.process.recorder_failure.empty()) {
    limitations.emplace_back("recording stopped before the end: " + trace.process.recorder_failure);
  } else if (still_runs) {
    limitations.emplace_back("the program still runs: this is what was recorded so far");
  } else if (trace.process.end_state == EndState::running) {
    limitations.emplace_back("the trace has no end: the process was killed, left by _exit, or still runs");
  }
}

void add_gaps_of_snapshot(const Trace& trace, std::vector<std::string>& limitations) {
  limitations.emplace_back(
      "a memory snapshot does not say what a block holds: categories, phases and steps are read from its stacks and "
      "annotations");
  const auto is_unnamed = [](const Device& device) { return device.name.empty(); };
  if (std::ranges::any_of(trace.devices, is_unnamed)) {
    limitations.emplace_back("a memory snapshot has no size of the GPU: it is what was reserved and free, at least");
  }
  const auto is_alloc = [](const Event& event) { return event.kind == EventKind::alloc; };
  if (std::none_of(trace.events.begin(), trace.events.end(), is_alloc)) {
    limitations.emplace_back("no history was recorded: the state is the one when the snapshot was taken");
  } else if (!trace.initial.empty()) {
    limitations.emplace_back(fmt::format(
        "{} blocks are older than the history: of those freed since, sizes are rounded", trace.initial.size()));
  }
  const auto has_line = [](const Context& context) { return context.source != 0; };
  if (std::none_of(trace.contexts.begin(), trace.contexts.end(), has_line)) {
    limitations.emplace_back(
        "no Python frames were recorded, so that most categories are unknown: "
        "torch.cuda.memory._record_memory_history() records them");
  }
}

constexpr std::string_view kMode = "mode";

/// Whether the virtual device said that work takes time (oomdiag run --clocked).
bool is_clocked(const History& history) {
  return std::ranges::find(history.notes, RecorderNote{std::string(kMode), "clocked"}) != history.notes.end();
}

/// Whose function it is; empty if `text` is none but words.
std::string_view library_of(std::string_view text) {
  if (text.find_first_of(" :/") != text.npos) return {};
  const std::string_view library = library_called(text);
  return library.empty() && text.starts_with("cu") ? "CUDA" : library;
}

// What the virtual device could not do, or only by estimate: areas by their names, functions by whose they are. The report's
// notes name each.
void add_notes_of(const History& history, std::string_view kind, const char* sentence,
                  std::vector<std::string>& limitations) {
  std::vector<std::string> areas;
  std::map<std::string_view, int> functions;
  for (const RecorderNote& note : history.notes) {
    if (note.kind != kind) continue;
    const std::string_view library = library_of(note.text);
    if (library.empty()) {
      areas.emplace_back(note.text);
    } else {
      ++functions[library];
    }
  }
  for (const auto& [library, count] : functions) {
    areas.push_back(fmt::format("{} of {}", counted(count, "function"), library));
  }
  if (!areas.empty()) limitations.push_back(fmt::format(fmt::runtime(sentence), fmt::join(areas, ", ")));
}

void add_notes(const History& history, std::vector<std::string>& limitations) {
  constexpr size_t kMaxNotes = 20;
  add_notes_of(history, "estimate", "estimates of the virtual device: {}", limitations);
  add_notes_of(history, "unsupported", "not in the virtual device, so that what it takes is missing: {}", limitations);
  size_t count = 0;
  for (const RecorderNote& note : history.notes) {
    const bool is_reported = note.kind == kMode || note.kind == "estimate" || note.kind == "unsupported";
    if (is_reported || count++ >= kMaxNotes) continue;
    limitations.push_back(fmt::format("{}: {}", note.kind, note.text));
  }
  if (count > kMaxNotes) limitations.push_back(fmt::format("{} more of these", count - kMaxNotes));
}

// What was there before: how much of it nothing names since.
void add_beginning(const Trace& trace, const DeviceHistory& device, std::vector<std::string>& limitations) {
  int64_t unnamed = 0;
  for (const LiveBlock& block : device.state.blocks) {
    if (block.before_recording && block.category == Category::unknown) unnamed += block.bytes;
  }
  if (unnamed == 0) return;
  const std::string when =
      trace.process.steps_before > 0 ? fmt::format(" (step {})", trace.process.steps_before + 1) : std::string();
  limitations.push_back(fmt::format("{} of GPU {} were allocated before recording began{}: known by size, not by maker",
                                    with_unit(unnamed), device.index, when));
}

bool is_of_convolution(const LiveBlock& block) {
  return block.category == Category::workspace && block.made.inner.find("conv") != std::string_view::npos;
}

// It lets cuDNN take other plans, and which one needs how much only cuDNN knows.
void add_unpredicted(const DeviceHistory& device, const std::string& gpu, std::vector<std::string>& limitations) {
  constexpr int64_t kLeastShare = 100;
  int64_t bytes = 0;
  for (const LiveBlock& block : device.state.blocks) bytes += is_of_convolution(block) ? block.bytes : 0;
  if (bytes * kLeastShare < device.state.allocated_bytes || bytes == 0) return;
  limitations.push_back(fmt::format(
      "{}what channels_last would change of the {} of convolution workspaces is not predicted", gpu, with_unit(bytes)));
}

/// Managed memory may be larger than the GPU. PyTorch counts it as reserved, where it asked for it.
void add_oversubscription(const Trace& trace, const DeviceHistory& device, const std::string& gpu,
                          std::vector<std::string>& limitations) {
  int64_t managed = 0;
  for (const NonPytorchOwner& one : device.state.host_memory) managed += one.kind == "managed" ? one.bytes : 0;
  const int64_t total = find_gpu(trace, device.index).total_bytes;
  const int64_t used = std::max(managed, device.state.reserved_bytes) + device.state.non_pytorch_bytes;
  if (managed == 0 || total == 0 || used <= total) return;
  limitations.push_back(
      fmt::format("{}{} of managed memory do not fit the GPU beside the rest: its pages move between GPU and host, "
                  "and how long that takes is not known",
                  gpu, with_unit(std::min(used - total, managed))));
}

void add_doubts(const Trace& trace, const DeviceHistory& device, bool only_one, std::vector<std::string>& limitations) {
  const std::string gpu = only_one ? "" : fmt::format("GPU {}: ", device.index);
  if (device.replay_error_bytes > 0) {
    limitations.push_back(
        fmt::format("{}the replay differs from PyTorch's own count by up to {} bytes", gpu, device.replay_error_bytes));
  }
  if (device.counted_peak_bytes > device.peak.allocated_bytes) {
    limitations.push_back(
        fmt::format("{}the peak lies outside of what was recorded; described is the highest point of it, {} bytes", gpu,
                    device.peak.allocated_bytes));
  }
  if (!device.reserved_known) {
    limitations.push_back(gpu + "reserved bytes are a lower bound: the trace begins after the segments were allocated");
  }
  if (!trace.process.snapshot && !device.non_pytorch_measured && find_gpu(trace, device.index).context_bytes == 0) {
    limitations.push_back(gpu + "non-PyTorch memory is not known: the GPU was never asked");
  }
  if (device.state.saved_from_earlier_step) {
    limitations.push_back(
        fmt::format("{}the graph of step {} was not walked: what it saved is known from an earlier step like it", gpu,
                    device.state.step));
  }
  if (!trace.process.snapshot && device.step_allocations.step > 0 &&
      !is_like(device.step_allocations, device.complete) && device.failure) {
    limitations.push_back(gpu + std::string(kNoWholeStep));
  }
  if (!trace.process.snapshot && device.failure && device.failure->phase == Phase::forward) {
    const auto& blocks = device.state.blocks;
    if (std::none_of(blocks.begin(), blocks.end(), [](const auto& b) { return b.category == Category::activation; })) {
      limitations.push_back(gpu + "no graph of this forward was seen: what autograd saves is among the outputs");
    }
  }
  add_oversubscription(trace, device, gpu, limitations);
  add_unpredicted(device, gpu, limitations);
  if (device.packed_tensors > 0) {
    limitations.push_back(
        fmt::format("{}{} saved tensors went through user hooks: their size is not known", gpu, device.packed_tensors));
  }
}

bool shares_a_gpu(const History& history) {
  return std::ranges::any_of(history.devices, [](const DeviceHistory& device) {
    return std::ranges::any_of(device.state.non_pytorch, [](const NonPytorchOwner& one) {
      return one.kind == "process" || one.kind == "system";
    });
  });
}

// A thread of the autograd engine that is not at rest yet asks for the GIL of an interpreter that ends.
bool aborted_after_its_work(const Trace& trace, const ReportInputs& inputs) {
  const bool aborted = inputs.signal == SIGABRT || inputs.exit_code == 128 + SIGABRT;
  return aborted && trace.process.python_ended;
}

}  // namespace

std::vector<std::string> list_limitations(const Trace& trace, const History& history, const ReportInputs& inputs) {
  std::vector<std::string> limitations;
  if (trace.process.virtual_device) {
    limitations.push_back(fmt::format("the GPU is virtual: context bytes are modelled, {}work takes {} time",
                                      shares_a_gpu(history) ? "" : "other programs take nothing, ",
                                      is_clocked(history) ? "modelled" : "no"));
  }
  if (trace.process.snapshot) add_gaps_of_snapshot(trace, limitations);
  if (aborted_after_its_work(trace, inputs)) {
    limitations.emplace_back(
        "the program had done its work: PyTorch itself aborts now and then (signal 6) when Python ends "
        "right after a backward pass, with and without oomdiag (pytorch/pytorch issue 190489)");
  }
  add_losses(trace, inputs.still_runs, limitations);
  for (const DeviceHistory& device : history.devices) {
    if (trace.process.unwatched) continue;  // the note on why says it all
    add_beginning(trace, device, limitations);
    add_doubts(trace, device, history.devices.size() == 1, limitations);
  }
  add_notes(history, limitations);
  // Those of the oldest steps may be overwritten.
  add_reads(history.reads, trace.overwritten_events == 0, limitations);
  limitations.insert(limitations.end(), inputs.limitations.begin(), inputs.limitations.end());
  return limitations;
}

}  // namespace oomdiag
