#include "profiler/replay/evidence/allocation_reader.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "profiler/replay/steps/prescan.h"

namespace oomdiag {
namespace {

bool has_workspace_size(const Row& row, const Trace& trace) {
  return is_cublas_workspace(row.maker.bytes,
                             row.device < trace.devices.size() ? trace.devices[row.device].cublas_workspace_bytes : 0);
}

}  // namespace

RowReader::RowReader(const Trace& trace, const NodeTable& nodes, const BlockTable& table,
                     std::span<const uint32_t> rows, const Horizon& horizon)
    : trace_(trace), nodes_(nodes), horizon_(horizon) {
  const auto is_parameter = [&](uint32_t id) { return table[id].parameter; };
  modules_known_ = trace.process.python && std::any_of(rows.begin(), rows.end(), is_parameter);
  workspaces_ = find_kept_workspaces(table, rows);
}

// Who keeps a block no snapshot tells; only what was made inside an optimizer's step is likely to be its state.
Category RowReader::category_of(const Row& row, bool saved) const {
  const Category category = categorise(gather(row, saved));
  const bool known = !trace_.process.snapshot || category == Category::optimizer_state;
  return known ? category : Category::unknown;
}

std::vector<Where> RowReader::locate_savers(std::vector<Saver> savers) const {
  // A node may keep one storage several times (x ∙ x), and an OOM in backward is described by two walks. Forward numbers
  // the nodes upwards.
  const auto node_of = [](const Saver& saver) { return std::tuple(saver.node_sequence, saver.node_thread); };
  std::stable_sort(savers.begin(), savers.end(), [&](const auto& a, const auto& b) { return node_of(a) < node_of(b); });
  const auto same = [&](const auto& a, const auto& b) { return node_of(a) == node_of(b); };
  savers.erase(std::unique(savers.begin(), savers.end(), same), savers.end());
  std::vector<Where> places;
  for (const Saver& saver : savers) {
    places.push_back(
        locate(trace_, nodes_,
               {.node_sequence = saver.node_sequence, .context = saver.context, .node_thread = saver.node_thread}));
  }
  return places;
}

AllocationEvidence RowReader::gather(const Row& row, bool saved) const {
  const Context& context = trace_.context(row.maker.context);
  const bool dead = row.died < horizon_.end;
  const bool optimizer_is_open =
      horizon_.optimizer_open_since != kNoEvent && !row.is_initial() && row.born > horizon_.optimizer_open_since;
  // Also where the graph was not walked: what a recorded op made and a node of backward frees was saved for it.
  const bool freed_by_backward = row.freed_in_node && row.died < horizon_.unwound && is_in_graph(row);
  return {.parameter = row.parameter,
          .buffer = row.buffer,
          .gradient = row.gradient_since < horizon_.named_end,
          .state = row.state,
          .saved = saved || freed_by_backward,
          .ever_saved = row.ever_saved,
          .phase = row.phase,
          .in_node = in_node(row.maker) || context.node != 0,
          .recomputed = (context.flags & kRecomputation) != 0,
          .in_optimizer = is_optimizer_step(trace_.name(context.scope)),
          .optimizer_is_open = dead ? row.died_in_optimizer : optimizer_is_open,
          .in_module = context.module != 0,
          .op_made_nodes = op_made_nodes(row),
          .grad_mode = (context.flags & kGradMode) != 0,
          .first_in_op = row.first_in_op(),
          .dies_in_op = dies_in_op(row),
          .kept_workspace = workspaces_.contains(&row),
          .modules_known = modules_known_,
          .op = trace_.name(context.op),
          .inner = trace_.name(context.inner)};
}

// Of a block older than the trace it is not known whether its op made nodes: grad mode is the best guess.
bool RowReader::op_made_nodes(const Row& row) const {
  return row.op_made_nodes || (row.is_initial() && (trace_.context(row.maker.context).flags & kGradMode) != 0);
}

// At a peak the op goes on, and what it frees itself was only for itself. In an op that failed nothing was freed in time.
bool RowReader::dies_in_op(const Row& row) const {
  const bool in_failed_op = horizon_.failed_op != 0 && row.maker.op_serial == horizon_.failed_op;
  return (row.died_in_op && row.died < horizon_.unwound) || (in_failed_op && !row.first_in_op());
}

// The blocks that cuBLAS keeps as workspace. A handle has one per stream, and a thread one handle: only the oldest block of
// that size counts, and never the first of its op, which is the op's result.
std::set<const Row*> RowReader::find_kept_workspaces(const BlockTable& table, std::span<const uint32_t> rows) const {
  std::map<std::tuple<uint16_t, uint64_t, int64_t>, const Row*> oldest;
  for (const uint32_t id : rows) {
    const Row& row = table[id];
    const bool result = row.first_in_op() && !row.is_initial();
    if (result || !has_workspace_size(row, trace_) || dies_in_op(row)) continue;
    if (!is_gemm(trace_.name(trace_.context(row.maker.context).inner))) continue;
    const Row*& found = oldest[{row.maker.thread, row.maker.detail, row.maker.bytes}];
    if (found == nullptr || row.maker.sequence < found->maker.sequence) found = &row;
  }
  std::set<const Row*> kept;
  for (const auto& [key, row] : oldest) kept.insert(row);
  return kept;
}

}  // namespace oomdiag
