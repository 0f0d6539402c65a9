#pragma once

#include <cstdint>
#include <vector>

#include "profiler/replay/allocations/allocation_table.h"

namespace oomdiag {

/// Knows of each thread the op call that runs, and what it made: it says only later that it made autograd nodes, too.
class OpenOps {
 public:
  /// A new allocation, made by `allocation.maker`.
  void note_alloc(uint32_t id, Allocation& allocation) {
    if (allocation.maker.call_id == 0) return;
    Call& call = call_of(allocation.maker);
    allocation.nth_in_op = call.allocs++;
    allocation.op_made_nodes = call.made_nodes;
    if (!call.made_nodes) call.allocations.push_back(id);
  }
  /// Whether the op call of this event has made something before it.
  bool has_allocated(const Event& event) const {
    return event.call_id != 0 && event.thread < calls_.size() && calls_[event.thread].serial == event.call_id &&
           calls_[event.thread].allocs > 0;
  }
  /// A nodes_created event.
  void note_nodes(const Event& event, AllocationTable& table) {
    if (event.call_id == 0) return;
    Call& call = call_of(event);
    call.made_nodes = true;
    for (const uint32_t id : call.allocations) {
      if (table[id].maker.call_id == event.call_id) table[id].op_made_nodes = true;
    }
    call.allocations.clear();
  }

 private:
  struct Call {
    uint32_t serial = 0, allocs = 0;
    bool made_nodes = false;
    std::vector<uint32_t> allocations{};
  };
  Call& call_of(const Event& event) {
    if (event.thread >= calls_.size()) calls_.resize(event.thread + size_t{1});
    Call& call = calls_[event.thread];
    if (call.serial != event.call_id) {
      call.serial = event.call_id;
      call.allocs = 0;
      call.made_nodes = false;
      call.allocations.clear();
    }
    return call;
  }

  std::vector<Call> calls_;  ///< by thread
};

}  // namespace oomdiag
