#include "samples/cases/scopes.h"

#include <algorithm>
#include <unordered_map>

#include "profiler/event.h"
#include "profiler/replay/allocator/blocks.h"
#include "profiler/replay/allocator/settings.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

constexpr std::string_view kMarkPrefix = "sample#";

class ScopeReader {
 public:
  explicit ScopeReader(const Trace& trace)
      : trace_(trace), blocks_(parse_allocator_settings(trace.process.allocator_settings)) {
    blocks_.start_from(trace.initial, trace.initial_layout, 0);
  }

  ScopeSheet run() {
    for (auto at = trace_.events.begin(); at != trace_.events.end(); ++at) take(*at, static_cast<uint32_t>(at.index()));
    while (!open_.empty()) end();  // an exception, or a kill
    collect_transients();
    return std::move(sheet_);
  }

 private:
  static constexpr size_t kNone = ~size_t{0};

  /// A block in use, and who took it.
  struct Taken {
    int64_t bytes = 0;
    uint32_t call_id = 0;
    uint32_t context = 0;
    std::vector<size_t> makers;  ///< calls that were open
  };

  void take(const Event& event, uint32_t index) {
    if (event.device != 0) return;
    if (event.kind == EventKind::scope_begin) return begin(trace_.name(event.detail));
    if (event.kind == EventKind::scope_end) return end_innermost(trace_.name(event.detail));
    const int64_t before = blocks_.allocated_bytes();
    blocks_.apply(event, index);
    if (event.kind == EventKind::alloc) note_alloc(event, blocks_.allocated_bytes() - before);
    if (event.kind == EventKind::free_requested) note_free(event);
  }

  void begin(std::string_view name) {
    if (name.starts_with(kMarkPrefix)) name.remove_prefix(kMarkPrefix.size());
    const int64_t now = blocks_.allocated_bytes();
    sheet_.calls.push_back({.name = std::string(name),
                            .begin_bytes = now,
                            .peak_bytes = now,
                            .end_bytes = now,
                            .begin_reserved_bytes = blocks_.reserved_bytes()});
    parents_.push_back(open_.empty() ? kNone : open_.back());
    open_.push_back(sheet_.calls.size() - 1);
  }

  void end_innermost(std::string_view name) {
    if (name.starts_with(kMarkPrefix)) name.remove_prefix(kMarkPrefix.size());
    const auto same = [&](size_t call) { return sheet_.calls[call].name == name; };
    if (std::none_of(open_.begin(), open_.end(), same)) return;  // began before the trace
    while (sheet_.calls[open_.back()].name != name) end();
    end();
  }

  void end() {
    const size_t ended = open_.back();
    open_.pop_back();
    sheet_.calls[ended].end_bytes = blocks_.allocated_bytes();
    sheet_.calls[ended].end_reserved_bytes = blocks_.reserved_bytes();
    for (const auto& [address, taken] : taken_) {
      for (const size_t maker : taken.makers) {
        const bool counts = parents_[maker] == ended || (maker == ended && parents_[ended] == kNone);
        if (counts) sheet_.calls[maker].kept_bytes += taken.bytes;
      }
    }
  }

  void note_alloc(const Event& event, int64_t bytes) {
    taken_[event.address] = {bytes, event.call_id, event.context, open_};
    for (const size_t call : open_) {
      sheet_.calls[call].peak_bytes = std::max(sheet_.calls[call].peak_bytes, blocks_.allocated_bytes());
      const std::string& name = sheet_.calls[call].name;
      sheet_.most_alive[name] = std::max(sheet_.most_alive[name], alive_[name] += bytes);
    }
  }

  void note_free(const Event& event) {
    const auto found = taken_.find(event.address);
    if (found == taken_.end()) return;
    const Taken& taken = found->second;
    for (const size_t call : taken.makers) alive_[sheet_.calls[call].name] -= taken.bytes;
    if (taken.call_id != 0 && taken.call_id == event.call_id) note_transient(taken);
    taken_.erase(found);
  }

  void note_transient(const Taken& taken) {
    const Context& context = trace_.context(taken.context);
    Transient& transient = transients_[{context.op, context.node}];
    transient.most_bytes = std::max(transient.most_bytes, taken.bytes);
    ++transient.count;
  }

  void collect_transients() {
    for (auto& [where, transient] : transients_) {
      transient.op = trace_.name(where.first);
      transient.node = trace_.name(where.second);
      sheet_.transients.push_back(std::move(transient));
    }
    std::stable_sort(sheet_.transients.begin(), sheet_.transients.end(),
                     [](const Transient& a, const Transient& b) { return a.most_bytes > b.most_bytes; });
  }

  const Trace& trace_;
  Blocks blocks_;
  ScopeSheet sheet_;
  std::vector<size_t> parents_;  ///< of each call, the call around it
  std::vector<size_t> open_;     ///< innermost last
  std::unordered_map<uint64_t, Taken> taken_;
  std::map<std::string, int64_t> alive_;
  std::map<std::pair<uint32_t, uint32_t>, Transient> transients_;
};

}  // namespace

ScopeSheet read_scopes(const Trace& trace) { return ScopeReader(trace).run(); }

}  // namespace oomdiag
