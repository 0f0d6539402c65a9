#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "profiler/replay/allocations/allocation_table.h"
#include "profiler/replay/evidence/categories.h"
#include "profiler/replay/evidence/join.h"

namespace oomdiag {

/// How far somebody who looks at rows can see; indices of events.
struct Horizon {
  uint64_t end = kNoEvent;                   ///< of what is looked at: a row that died before is seen dead
  uint64_t named_end = kNoEvent;             ///< what is named a gradient from here on became one later
  uint64_t unwound = kNoEvent;               ///< from a fatal OOM on frees say nothing: everything is unwound
  uint64_t optimizer_open_since = kNoEvent;  ///< scope_begin of an optimizer step that has not ended at `end`
  uint32_t failed_op = 0;                    ///< the op call that a fatal OOM ended
};

/// Says what rows are: the one place where evidence becomes a category.
class RowReader {
 public:
  /// `rows`: all that are looked at together.
  RowReader(const Trace& trace, const NodeTable& nodes, const BlockTable& table, std::span<const uint32_t> rows,
            const Horizon& horizon);

  /// `saved`: a node of the living graph keeps it.
  Category category_of(const Row& row, bool saved) const;
  Where made_of(const Row& row) const { return locate(trace_, nodes_, row.maker); }
  /// Made by a forward op that recorded itself for backward.
  bool is_in_graph(const Row& row) const { return row.phase == Phase::forward && op_made_nodes(row); }
  /// The nodes, each once, in forward's order.
  std::vector<Where> locate_savers(std::vector<Saver> savers) const;

 private:
  AllocationEvidence gather(const Row& row, bool saved) const;
  bool op_made_nodes(const Row& row) const;
  bool dies_in_op(const Row& row) const;
  std::set<const Row*> find_kept_workspaces(const BlockTable& table, std::span<const uint32_t> rows) const;

  const Trace& trace_;
  const NodeTable& nodes_;
  Horizon horizon_;
  bool modules_known_ = false;
  std::set<const Row*> workspaces_;
};

}  // namespace oomdiag
