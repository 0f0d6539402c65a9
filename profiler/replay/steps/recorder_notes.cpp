#include "profiler/replay/steps/recorder_notes.h"

#include <string_view>

#include "profiler/event.h"
#include "profiler/replay/history.h"

namespace oomdiag {

void NoteReader::read(const Event& event) {
  if (event.kind != EventKind::note) return;
  if ((event.flags & kNoteRead) != 0) {
    ++reads_[event.context];
    return;
  }
  const uint32_t kind = trace_.context(event.context).op;
  if (trace_.name(kind) == kMark || !seen_.insert({kind, event.detail}).second) return;
  notes_.emplace_back(kind, event.detail);
}

std::vector<RecorderNote> NoteReader::notes() const {
  std::vector<RecorderNote> notes;
  for (const auto& [kind, text] : notes_)
    notes.push_back({std::string(trace_.name(kind)), std::string(trace_.name(text))});
  return notes;
}

std::vector<DeviceRead> NoteReader::reads() const {
  std::map<std::pair<std::string_view, std::string_view>, int64_t> counts;
  for (const auto& [index, count] : reads_) {
    const Context& context = trace_.context(index);
    counts[{trace_.name(context.op != 0 ? context.op : context.node), trace_.name(context.source)}] += count;
  }
  std::vector<DeviceRead> reads;
  for (const auto& [place, count] : counts) reads.push_back({place.first, place.second, count});
  return reads;
}

}  // namespace oomdiag
