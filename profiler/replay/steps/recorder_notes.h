#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "profiler/event.h"
#include "profiler/replay/history.h"
#include "profiler/trace/trace.h"

namespace oomdiag {

/// Collects what the recorder and the virtual device noted. A trace holds one event for every read from a virtual GPU,
/// but only as many different ones as it has contexts.
class NoteReader {
 public:
  explicit NoteReader(const Trace& trace) : trace_(trace) {}

  /// Takes the next event of the trace.
  void read(const Event& event);
  /// Each note once, by first appearance; marks are none of them.
  std::vector<RecorderNote> notes() const;
  /// Each place once.
  std::vector<DeviceRead> reads() const;

 private:
  const Trace& trace_;
  std::set<std::pair<uint32_t, uint64_t>> seen_;  ///< kind and text of notes_
  std::vector<std::pair<uint32_t, uint64_t>> notes_;
  std::map<uint32_t, int64_t> reads_;  ///< by context
};

}  // namespace oomdiag
