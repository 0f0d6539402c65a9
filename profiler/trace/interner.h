#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "profiler/event.h"
#include "profiler/trace/format.h"
#include "profiler/trace/shared_file.h"

namespace oomdiag {

/// The names and contexts of a trace that is written, each of them once. Any thread; locks.
class Interner {
 public:
  /// `header` says where they go, and learns how many there are. Both live as long as this.
  Interner(SharedFile& file, TraceHeader& header);

  /// The index, the same for equal ones; 0, which says nothing, when it is full.
  uint32_t intern(std::string_view name);
  uint32_t intern(const Context& context);

 private:
  struct ContextHash {
    size_t operator()(const Context& context) const noexcept;
  };
  bool append(std::string_view name);
  bool append(const Context& context, uint32_t index);

  SharedFile& file_;
  TraceHeader& header_;
  FileSection name_section_, context_section_;
  std::mutex mutex_;
  std::unordered_map<std::string, uint32_t> names_;
  std::unordered_map<Context, uint32_t, ContextHash> contexts_;
};

}  // namespace oomdiag
