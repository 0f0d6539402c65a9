#pragma once

#include <cstdint>
#include <vector>

#include "profiler/replay/allocations/allocation_table.h"

namespace oomdiag {

/// Knows of each thread the op call that runs, and what it made: it says only later that it made autograd nodes, too.
class OpenOps {
 public:
  /// A new row, made by `row.maker`.
  void note_alloc(uint32_t id, Row& row) {
    if (row.maker.op_serial == 0) return;
    Call& call = call_of(row.maker);
    row.nth_in_op = call.allocs++;
    row.op_made_nodes = call.made_nodes;
    if (!call.made_nodes) call.rows.push_back(id);
  }
  /// A nodes_created event.
  void note_nodes(const Event& event, BlockTable& table) {
    if (event.op_serial == 0) return;
    Call& call = call_of(event);
    call.made_nodes = true;
    for (const uint32_t id : call.rows) {
      if (table[id].maker.op_serial == event.op_serial) table[id].op_made_nodes = true;
    }
    call.rows.clear();
  }

 private:
  struct Call {
    uint32_t serial = 0, allocs = 0;
    bool made_nodes = false;
    std::vector<uint32_t> rows{};
  };
  Call& call_of(const Event& event) {
    if (event.thread >= calls_.size()) calls_.resize(event.thread + size_t{1});
    Call& call = calls_[event.thread];
    if (call.serial != event.op_serial) {
      call.serial = event.op_serial;
      call.allocs = 0;
      call.made_nodes = false;
      call.rows.clear();
    }
    return call;
  }

  std::vector<Call> calls_;  ///< by thread
};

}  // namespace oomdiag
