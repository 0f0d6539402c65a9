#include "profiler/replay/steps/ooms.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "profiler/event.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

bool describes_oom(EventKind kind) {
  constexpr std::array kDescriptions = {EventKind::device_memory,
                                        EventKind::memory_stats,
                                        EventKind::segment_state,
                                        EventKind::block_state,
                                        EventKind::requested_gradient,
                                        EventKind::op_failed,
                                        EventKind::graph_begin,
                                        EventKind::saved_tensor,
                                        EventKind::packed_tensor,
                                        EventKind::parameter,
                                        EventKind::buffer,
                                        EventKind::gradient,
                                        EventKind::stack,
                                        EventKind::gpu_step,
                                        EventKind::gpu_process,
                                        EventKind::grouped};
  return std::find(kDescriptions.begin(), kDescriptions.end(), kind) != kDescriptions.end();
}

bool is_convolution(std::string_view op) { return op.find("conv") != std::string_view::npos; }

}  // namespace

bool retries_with_less(const Trace& trace, const Context& context) {
  return is_convolution(trace.name(context.op)) || is_convolution(trace.name(context.inner));
}

void OomReader::read(const Event& event, uint64_t index) {
  if (!open_.empty()) [[unlikely]] {
    if (const auto open = open_.find(event.thread); open != open_.end()) {
      const size_t at = open->second;
      const bool same_op = event.call_id == call_ids_[at];
      if (describes_oom(event.kind)) ooms_[at].end = index;
      if (event.kind == EventKind::op_failed && same_op) {
        resolve(event.thread, Outcome::fatal);
      } else if (event.kind == EventKind::alloc || event.kind == EventKind::out_of_memory) {
        resolve(event.thread, outcome_without_failure(at));
      }
    }
  }
  if (!retries_.empty()) [[unlikely]]
    follow(event);
  if (event.kind != EventKind::out_of_memory) return;
  if (event.call_id != 0) {
    const auto [retry, fresh] = retries_.try_emplace(event.thread, Retry{event.call_id, event.context, ooms_.size()});
    if (!fresh && retry->second.address != 0) retry->second = {event.call_id, event.context, ooms_.size()};
  }
  open_[event.thread] = ooms_.size();
  call_ids_.push_back(event.call_id);
  recoverable_.push_back(can_be_recovered(event));
  ooms_.push_back({.event = index, .end = index, .device = event.device, .requested_bytes = event.bytes});
}

// Outside of any op no library recovers from an OOM, and no op_failed is written.
bool OomReader::can_be_recovered(const Event& oom) const {
  if (oom.call_id == 0) return false;
  return (oom.flags & kAskedByLibrary) != 0 || retries_with_less(*trace_, trace_->context(oom.context));
}

void OomReader::follow(const Event& event) {
  const auto found = retries_.find(event.thread);
  if (found == retries_.end() || describes_oom(event.kind)) return;
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
    for (size_t r = retry.first; r < ooms_.size(); ++r) {
      if (call_ids_[r] == retry.call_id) ooms_[r].granted_bytes = retry.bytes;
    }
    retries_.erase(found);
  }
}

void OomReader::note_progress(uint32_t call_id) {
  if (unwound_.empty()) [[likely]]
    return;
  std::erase_if(unwound_, [&](const Unwound& one) {
    if (call_id == call_ids_[one.oom] && call_id != 0) return false;
    ooms_[one.oom].outcome = Outcome::caught;
    return true;
  });
}

void OomReader::note_work(const Event& alloc, bool in_module) {
  if (unwound_.empty()) [[likely]]
    return;
  std::erase_if(unwound_, [&](Unwound& one) {
    if (alloc.thread != one.thread || (alloc.call_id == call_ids_[one.oom] && alloc.call_id != 0)) return false;
    // What handles the exception may ask a tensor for its largest element first, inside of the module that it left.
    const bool works = in_module && alloc.bytes >= ooms_[one.oom].requested_bytes / kTrifle;
    if (++one.allocs < kManyAllocs && !works) return false;
    ooms_[one.oom].outcome = Outcome::caught;
    return true;
  });
}

std::vector<OutOfMemory> OomReader::finish(std::optional<bool> survived) {
  // Nothing followed on the thread: only the exit status distinguishes a library that coped from a program that died at
  // once.
  while (!open_.empty()) {
    const auto [thread, at] = *open_.begin();
    resolve(thread, survived == true ? outcome_without_failure(at) : Outcome::fatal);
  }
  if (survived == true) {
    for (OutOfMemory& oom : ooms_) {
      if (oom.outcome == Outcome::fatal) oom.outcome = Outcome::caught;
    }
  }
  // What ended the program is the last one; others before it without progress in between were caught and tried again.
  OutOfMemory* last = nullptr;
  for (OutOfMemory& oom : ooms_) {
    if (oom.outcome != Outcome::fatal) continue;
    if (last != nullptr) last->outcome = Outcome::caught;
    last = &oom;
  }
  return std::move(ooms_);
}

void OomReader::resolve(uint16_t thread, Outcome outcome) {
  const size_t at = open_.at(thread);
  open_.erase(thread);
  ooms_[at].outcome = outcome;
  if (outcome == Outcome::fatal) unwound_.push_back({.oom = at, .thread = thread});
}

}  // namespace oomdiag
