#pragma once

#include <cstdint>

#include "profiler/event.h"

namespace oomdiag {

/// An OOM of a thread, of which it is not known yet whether the program gets to see it: known once an exception leaves
/// an op. One thread.
class PendingOom {
 public:
  /// The allocator wrote this out_of_memory event. Never locks nor allocates.
  void note_request(const Event& event) noexcept { request_ = event; }
  /// All retries have failed on `device`. Where the allocator wrote no event, the place is that of `otherwise`.
  void open(const Event& otherwise, uint8_t device) noexcept {
    if (request_.kind != EventKind::out_of_memory) request_ = otherwise;
    request_.kind = EventKind::op_failed;
    request_.device = device;
    is_open_ = true;
  }
  bool is_open() const noexcept { return is_open_; }
  /// It was found out where the request with this sequence was made.
  void place(uint64_t sequence, uint32_t context) noexcept {
    if (request_.sequence == sequence) request_.context = context;
  }
  /// Whether an OOM was described in this call of an op, or is from now on: the one description holds for all of them.
  bool is_described(uint32_t call_id) noexcept {
    const bool known = call_id != 0 && described_call_ == call_id;
    described_call_ = call_id;
    return known;
  }
  /// An op ends inside of which it came up. Its op_failed event, to be written if an exception leaves the op.
  Event close(uint64_t time) noexcept {
    is_open_ = false;
    Event event = request_;
    event.kind = EventKind::op_failed;
    event.time = time;
    event.address = event.detail = 0;
    return event;
  }

 private:
  bool is_open_ = false;
  uint32_t described_call_ = 0;
  Event request_;
};

}  // namespace oomdiag
