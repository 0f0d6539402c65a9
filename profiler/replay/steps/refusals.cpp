#include "profiler/replay/steps/refusals.h"

#include <algorithm>
#include <array>

namespace oomdiag {
namespace {

bool describes_refusal(EventKind kind) {
  constexpr std::array kDescriptions = {
      EventKind::device_memory, EventKind::memory_stats, EventKind::segment_state, EventKind::block_state,
      EventKind::wanted,        EventKind::op_failed,    EventKind::graph_begin,   EventKind::saved_tensor,
      EventKind::packed_tensor, EventKind::parameter,    EventKind::buffer,        EventKind::gradient,
      EventKind::stack,         EventKind::card_step,    EventKind::card_process,  EventKind::grouped};
  return std::find(kDescriptions.begin(), kDescriptions.end(), kind) != kDescriptions.end();
}

}  // namespace

void RefusalReader::read(const Event& event, uint64_t index) {
  if (!open_.empty()) [[unlikely]] {
    if (const auto open = open_.find(event.thread); open != open_.end()) {
      const size_t at = open->second;
      const bool same_op = event.call_id == serials_[at];
      if (describes_refusal(event.kind)) refusals_[at].end = index;
      if (event.kind == EventKind::op_failed && same_op) {
        settle(event.thread, Outcome::fatal);
      } else if (event.kind == EventKind::alloc || event.kind == EventKind::out_of_memory) {
        // Outside of any op nothing can absorb an OOM, and no op_failed is written.
        settle(event.thread, serials_[at] == 0 ? Outcome::fatal : Outcome::absorbed);
      }
    }
  }
  if (!retries_.empty()) [[unlikely]]
    follow(event);
  if (event.kind != EventKind::out_of_memory) return;
  if (event.call_id != 0) {
    const auto [retry, fresh] =
        retries_.try_emplace(event.thread, Retry{event.call_id, event.context, refusals_.size()});
    if (!fresh && retry->second.address != 0) retry->second = {event.call_id, event.context, refusals_.size()};
  }
  open_[event.thread] = refusals_.size();
  serials_.push_back(event.call_id);
  refusals_.push_back({.event = index, .end = index, .device = event.device, .requested_bytes = event.bytes});
}

void RefusalReader::follow(const Event& event) {
  const auto found = retries_.find(event.thread);
  if (found == retries_.end() || describes_refusal(event.kind)) return;
  Retry& retry = found->second;
  if (event.call_id != retry.call_id) {
    if (event.call_id != 0) retries_.erase(found);  // driver events and scopes carry none
    return;
  }
  if (event.kind == EventKind::alloc) {
    if (retry.address != 0 || event.context != retry.context) {
      retries_.erase(found);  // no scratch came before it: it went on without
    } else {
      retry.address = event.address;
      retry.bytes = event.bytes;
    }
  } else if (event.kind == EventKind::free_requested && event.address == retry.address) {
    for (size_t r = retry.first; r < refusals_.size(); ++r) {
      if (serials_[r] == retry.call_id) refusals_[r].granted_bytes = retry.bytes;
    }
    retries_.erase(found);
  }
}

void RefusalReader::note_progress(uint32_t call_id) {
  if (unwound_.empty()) [[likely]]
    return;
  std::erase_if(unwound_, [&](const Unwound& one) {
    if (call_id == serials_[one.refusal] && call_id != 0) return false;
    refusals_[one.refusal].outcome = Outcome::caught;
    return true;
  });
}

void RefusalReader::note_work(const Event& alloc, bool in_module) {
  if (unwound_.empty()) [[likely]]
    return;
  std::erase_if(unwound_, [&](Unwound& one) {
    if (alloc.thread != one.thread || (alloc.call_id == serials_[one.refusal] && alloc.call_id != 0)) return false;
    // What handles the exception may ask a tensor for its largest element first, inside of the module that it left.
    const bool works = in_module && alloc.bytes >= refusals_[one.refusal].requested_bytes / kTrifle;
    if (++one.allocs < kManyAllocs && !works) return false;
    refusals_[one.refusal].outcome = Outcome::caught;
    return true;
  });
}

std::vector<OutOfMemory> RefusalReader::finish(std::optional<bool> survived) {
  // Nothing followed on the thread: only the exit status can tell a library that coped from a program that died at once.
  while (!open_.empty()) {
    const auto [thread, at] = *open_.begin();
    settle(thread, survived == true && serials_[at] != 0 ? Outcome::absorbed : Outcome::fatal);
  }
  if (survived == true) {
    for (OutOfMemory& refusal : refusals_) {
      if (refusal.outcome == Outcome::fatal) refusal.outcome = Outcome::caught;
    }
  }
  // What ended the program is the last one; others before it without progress in between were caught and tried again.
  OutOfMemory* last = nullptr;
  for (OutOfMemory& refusal : refusals_) {
    if (refusal.outcome != Outcome::fatal) continue;
    if (last != nullptr) last->outcome = Outcome::caught;
    last = &refusal;
  }
  return std::move(refusals_);
}

void RefusalReader::settle(uint16_t thread, Outcome outcome) {
  const size_t at = open_.at(thread);
  open_.erase(thread);
  refusals_[at].outcome = outcome;
  if (outcome == Outcome::fatal) unwound_.push_back({.refusal = at, .thread = thread});
}

}  // namespace oomdiag
