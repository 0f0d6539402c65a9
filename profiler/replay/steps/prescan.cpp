#include "profiler/replay/steps/prescan.h"

#include <algorithm>
#include <array>

#include "profiler/event.h"
#include "profiler/replay/steps/iterations.h"
#include "profiler/replay/steps/ooms.h"
#include "profiler/replay/steps/recorder_notes.h"
#include "profiler/trace/event_log.h"
#include "profiler/trace/format.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

// Making and moving tensors also makes autograd nodes where parameters are moved to the GPU, and so do views (LibTorch
// initialises a convolution by weight[0][0].numel()); that is not training yet.
bool moves_tensors(std::string_view op) {
  constexpr std::array kMovers = {
      "aten::to",        "aten::_to_copy", "aten::cuda",    "aten::detach",    "aten::clone",   "aten::alias",
      "aten::copy_",     "aten::select",   "aten::taken",   "aten::view",      "aten::t",       "aten::narrow",
      "aten::transpose", "aten::expand",   "aten::permute", "aten::unsqueeze", "aten::squeeze", "aten::as_strided"};
  return std::find(kMovers.begin(), kMovers.end(), op) != kMovers.end();
}

// The index of the first event of the op call that `index` belongs to.
uint64_t first_event_of_op(const EventLog& events, uint64_t index) {
  constexpr uint64_t kFarthest = 1 << 16;  // bounds the work in a damaged trace
  const Event event = events[index];
  uint64_t first = index;
  for (uint64_t i = index; i > 0 && index - i < kFarthest; --i) {
    const Event before = events[i - 1];
    if (before.thread != event.thread) continue;
    if (before.call_id != event.call_id) break;
    first = i - 1;
  }
  return event.call_id == 0 ? index : first;
}

// Where the oldest events are gone, the recorder's own list of steps takes their place.
void begin_in_the_middle(const Trace& trace, TracePrescan& prescan) {
  if (trace.events.empty() || trace.step_ends.empty()) return;
  const uint64_t first = trace.events.front().sequence;
  prescan.first_step = trace.step_of(first);
  prescan.has_optimizer_scopes |= trace.steps_by_optimizer;
  if (trace.step_stride > 1) return;
  prescan.step_begins.clear();
  for (auto end = std::lower_bound(trace.step_ends.begin(), trace.step_ends.end(), first); end != trace.step_ends.end();
       ++end) {
    prescan.step_begins.push_back(*end + 1 - first);  // no sequence is missing but among the newest
  }
}

void add_stack(const Trace& trace, const Event& event, Stacks& stacks) {
  if (event.kind == EventKind::stack) stacks.emplace(trace.name(event.address), trace.name(event.detail));
}

}  // namespace

std::vector<bool> find_optimizer_names(const Trace& trace) {
  std::vector<bool> found(trace.names.size());
  for (size_t i = 0; i < found.size(); ++i) found[i] = is_optimizer_step(trace.names[i]);
  return found;
}

TracePrescan prescan_trace(const Trace& trace, std::optional<bool> survived) {
  TracePrescan prescan;
  prescan.first_step = 1 + trace.process.steps_before;
  OomReader ooms(trace);
  NoteReader notes(trace);
  IterationFinder iterations(trace);
  for (const Event& event : trace.initial) {
    if (event.device < kMaxDevices) prescan.devices |= 1u << event.device;
  }
  for (const Event& event : trace.kept) {
    notes.read(event);
    add_stack(trace, event, prescan.stacks);
  }
  const std::vector<bool> optimizer_names = find_optimizer_names(trace);
  bool backward_ran = false;
  bool trains = false;
  uint64_t module_runs_from = TracePrescan::kNever;  // its first allocation, while nothing outside of modules allocates
  for (auto at = trace.events.begin(); at != trace.events.end(); ++at) {
    const Event& event = *at;
    const uint64_t i = at.index();
    if (event.device < kMaxDevices) prescan.devices |= 1u << event.device;
    if (ooms.follows() || event.kind == EventKind::out_of_memory) [[unlikely]]
      ooms.read(event, i);
    switch (event.kind) {
      case EventKind::alloc: {
        iterations.read(event, i);
        const Context& context = trace.context(event.context);
        if (in_backward(trace, event)) {
          backward_ran = trains = true;
          break;
        }
        const bool in_module = context.module != 0;
        ooms.note_work(event, event.call_id != 0 && in_module);
        if (!in_module || module_runs_from == TracePrescan::kNever)
          module_runs_from = in_module ? i : TracePrescan::kNever;
        break;
      }
      case EventKind::nodes_created: {
        const Context& context = trace.context(event.context);
        if (in_backward(trace, event)) break;
        ooms.note_progress(event.call_id);
        if (prescan.first_forward == TracePrescan::kNever && !moves_tensors(trace.name(context.op))) {
          // A module may compute for long before what it computes needs a graph: the edges of a graph network.
          const bool in_module = context.module != 0 && module_runs_from != TracePrescan::kNever;
          prescan.first_forward = first_event_of_op(trace.events, in_module ? std::min(i, module_runs_from) : i);
        }
        if (backward_ran) prescan.step_begins.push_back(first_event_of_op(trace.events, i));
        backward_ran = false;
        break;
      }
      case EventKind::scope_begin:
        iterations.read(event, i);
        if (event.detail >= optimizer_names.size() || !optimizer_names[event.detail]) break;
        prescan.has_optimizer_scopes = true;
        ooms.note_progress(0);
        break;
      case EventKind::scope_end:
        iterations.read(event, i);
        break;
      case EventKind::graph_begin:
        prescan.last_traversal = i;
        break;
      case EventKind::grouped:
        trains = true;  // an optimizer lives
        break;
      case EventKind::note:
        notes.read(event);
        break;
      case EventKind::stack:
        add_stack(trace, event, prescan.stacks);
        break;
      default:
        break;
    }
  }
  if (trace.overwritten_events > 0) begin_in_the_middle(trace, prescan);
  if (prescan.has_optimizer_scopes) prescan.step_begins.clear();
  prescan.iterations = iterations.finish(trains || prescan.has_optimizer_scopes);
  if (prescan.iterations.is_known() || prescan.first_forward == TracePrescan::kNever) {
    prescan.first_forward = prescan.iterations.first;
  }
  if (trace.process.steps_before > 0 || trace.overwritten_events > 0) prescan.first_forward = 0;
  prescan.ooms = ooms.finish(survived);
  prescan.notes = notes.notes();
  prescan.reads = notes.reads();
  return prescan;
}

}  // namespace oomdiag
