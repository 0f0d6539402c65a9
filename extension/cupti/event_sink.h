#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "extension/cupti/calling_libraries.h"
#include "extension/cupti/collector.h"
#include "profiler/event.h"
#include "profiler/trace/writer.h"

namespace oomdiag {

/// Where events go: to the trace, or, before there is one, into a list for later. Calls must not overlap, but for `make`.
class EventSink {
 public:
  /// An event of this kind with what the calling thread is doing filled in.
  Event make(EventKind kind) const noexcept;

  /// Writes the event; its detail becomes `text`, or else the name of the shared object that called.
  void write(Event& event, uint16_t library, const std::string& text);
  /// Writes an event whose detail is no name. Before there is a trace it is lost.
  void write_plain(Event& event) noexcept;

  /// From now on events go to `writer`, first those of before.
  void attach(TraceWriter& writer, MakeEvent make_event);

  TraceWriter* writer() const { return writer_; }
  /// Events from before that did not fit.
  uint64_t lost() const { return lost_; }
  CallingLibraries& libraries() { return libraries_; }

 private:
  /// An event from before, and what its name will be.
  struct Pending {
    Event event;
    uint16_t library = 0;
    std::string text;
  };
  uint32_t intern(uint16_t library, const std::string& text);

  CallingLibraries libraries_;
  TraceWriter* writer_ = nullptr;
  MakeEvent make_event_ = nullptr;
  std::vector<Pending> pending_;
  uint64_t lost_ = 0;
  std::array<uint32_t, CallingLibraries::kMax> interned_{};  ///< by library
};

}  // namespace oomdiag
