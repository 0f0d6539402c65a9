#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/history.h"
#include "profiler/replay/steps/iterations.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// The stack by which each line of the program was first reached.
using Stacks = std::unordered_map<std::string_view, std::string_view>;

/// What must be known of a whole trace before it can be replayed in order (an op's first allocation often comes before the
/// event that says that the op made autograd nodes), and what needs no order.
struct TracePrescan {
  static constexpr uint64_t kNever = ~uint64_t{0};

  uint64_t first_forward = kNever;    ///< index of the first event of the first forward op; 0 if the trace begins later
  uint32_t first_step = 1;            ///< the step that it belongs to
  bool has_optimizer_scopes = false;  ///< steps end where scopes named "Optimizer.step…" end
  std::vector<uint64_t> step_begins;  ///< without such scopes: indices of the first events of steps 2, 3, …
  IterationRule iterations;           ///< of a program that does not train
  std::vector<OutOfMemory> ooms;      ///< event, end, device and outcome only
  uint32_t devices = 0;               ///< a bit for each that has events
  uint64_t last_traversal = kNever;   ///< index of the newest graph_begin event
  Stacks stacks;
  std::vector<RecorderNote> notes;
  std::vector<DeviceRead> reads;
};

/// Prescans `trace` in one pass. `survived`: the program is known to have ended well, so that no OOM was
/// fatal; or known not to have; else it is guessed from what follows an OOM.
TracePrescan prescan_trace(const Trace& trace, std::optional<bool> survived);

/// Whether an event belongs to a backward node that runs; also for those whose node_sequence says something else.
inline bool in_backward(const Trace& trace, const Event& event) {
  if (event.kind != EventKind::nodes_created && event.node_sequence != kNoNode) return true;
  return trace.context(event.context).node != 0;
}

/// Whether `name` is the scope that PyTorch (or the samples) opens around an optimizer step.
inline bool is_optimizer_step(std::string_view name) { return name.starts_with("Optimizer.step"); }
/// Which of the trace's names are such.
std::vector<bool> find_optimizer_names(const Trace& trace);

}  // namespace oomdiag
