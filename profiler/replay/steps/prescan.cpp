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

namespace {

/// One walk over the events: what each of them says of steps, failures and the recorder itself.
class Prescanner {
 public:
  explicit Prescanner(const Trace& trace)
      : trace_(trace), ooms_(trace), notes_(trace), iterations_(trace), optimizer_names_(find_optimizer_names(trace)) {
    prescan_.first_step = 1 + trace.process.steps_before;
    for (const Event& event : trace.initial) note_device(event);
    for (const Event& event : trace.kept) {
      notes_.read(event);
      add_stack(trace, event, prescan_.stacks);
    }
  }

  void read(const Event& event, uint64_t index) {
    note_device(event);
    if (ooms_.follows() || event.kind == EventKind::out_of_memory) [[unlikely]]
      ooms_.read(event, index);
    switch (event.kind) {
      case EventKind::alloc:
        return read_alloc(event, index);
      case EventKind::nodes_created:
        return read_nodes(event, index);
      case EventKind::scope_begin:
        iterations_.read(event, index);
        if (event.detail >= optimizer_names_.size() || !optimizer_names_[event.detail]) return;
        prescan_.has_optimizer_scopes = true;
        return ooms_.note_progress(0);
      case EventKind::scope_end:
        return iterations_.read(event, index);
      case EventKind::graph_begin:
        prescan_.last_traversal = index;
        return;
      case EventKind::grouped:
        trains_ = true;  // an optimizer lives
        return;
      case EventKind::note:
        return notes_.read(event);
      case EventKind::stack:
        return add_stack(trace_, event, prescan_.stacks);
      default:
        return;
    }
  }

  TracePrescan finish(std::optional<bool> survived) {
    if (trace_.overwritten_events > 0) begin_in_the_middle(trace_, prescan_);
    if (prescan_.has_optimizer_scopes) prescan_.step_begins.clear();
    prescan_.iterations = iterations_.finish(trains_ || prescan_.has_optimizer_scopes);
    if (prescan_.iterations.is_known() || prescan_.first_forward == TracePrescan::kNever) {
      prescan_.first_forward = prescan_.iterations.first;
    }
    if (trace_.process.steps_before > 0 || trace_.overwritten_events > 0) prescan_.first_forward = 0;
    prescan_.ooms = ooms_.finish(survived);
    prescan_.notes = notes_.notes();
    prescan_.reads = notes_.reads();
    return std::move(prescan_);
  }

 private:
  void note_device(const Event& event) {
    if (event.device < kMaxDevices) prescan_.devices |= 1u << event.device;
  }

  void read_alloc(const Event& event, uint64_t index) {
    iterations_.read(event, index);
    const Context& context = trace_.context(event.context);
    if (in_backward(trace_, event)) {
      backward_ran_ = trains_ = true;
      return;
    }
    const bool in_module = context.module != 0;
    ooms_.note_work(event, event.call_id != 0 && in_module);
    if (!in_module || module_runs_from_ == TracePrescan::kNever)
      module_runs_from_ = in_module ? index : TracePrescan::kNever;
  }

  void read_nodes(const Event& event, uint64_t index) {
    const Context& context = trace_.context(event.context);
    if (in_backward(trace_, event)) return;
    ooms_.note_progress(event.call_id);
    if (prescan_.first_forward == TracePrescan::kNever && !moves_tensors(trace_.name(context.op))) {
      // A module may compute for long before what it computes needs a graph: the edges of a graph network.
      const bool in_module = context.module != 0 && module_runs_from_ != TracePrescan::kNever;
      prescan_.first_forward = first_event_of_op(trace_.events, in_module ? std::min(index, module_runs_from_) : index);
    }
    if (backward_ran_) prescan_.step_begins.push_back(first_event_of_op(trace_.events, index));
    backward_ran_ = false;
  }

  const Trace& trace_;
  OomReader ooms_;
  NoteReader notes_;
  IterationFinder iterations_;
  std::vector<bool> optimizer_names_;
  TracePrescan prescan_;
  bool backward_ran_ = false;
  bool trains_ = false;
  /// Its first allocation, while nothing outside of modules allocates.
  uint64_t module_runs_from_ = TracePrescan::kNever;
};

}  // namespace

TracePrescan prescan_trace(const Trace& trace, std::optional<bool> survived) {
  Prescanner prescanner(trace);
  for (auto at = trace.events.begin(); at != trace.events.end(); ++at) prescanner.read(*at, at.index());
  return prescanner.finish(survived);
}

}  // namespace oomdiag
