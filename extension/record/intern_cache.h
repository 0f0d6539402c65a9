#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "profiler/trace/writer.h"

namespace oomdiag {

/// Remembers the ids of names and contexts that a thread has met, also of those that found no room, so that the common case
/// locks nothing. Starts small, since many threads meet few, and never outgrows some hundred KiB. One thread.
class InternCache {
 public:
  explicit InternCache(TraceWriter& writer) : writer_(writer) {}

  /// The id of an op's name. `name` need not outlive the call.
  uint32_t name(const char* name);
  uint32_t name(std::string_view name);
  uint32_t context(const Context& context);
  /// The id of `inside`, which is the context `outside` with another inner op: the commonest step, at half the price.
  uint32_t inner_context(uint32_t outside, const Context& inside);

 private:
  /// One place for each hash. Forgets everything when it grows.
  template <class Entry>
  class Table {
   public:
    Entry& at(uint64_t hash) { return entries_[(hash >> 40) & (entries_.size() - 1)]; }
    /// To be called when an entry that says something gives way to another one; references to entries end.
    bool grows() {
      if (entries_.size() == kMost || ++evicted_ < entries_.size()) return false;
      entries_.assign(entries_.size() * 8, {});
      evicted_ = 0;
      return true;
    }

   private:
    static constexpr size_t kFirst = 64, kMost = 4096;
    std::vector<Entry> entries_ = std::vector<Entry>(kFirst);
    size_t evicted_ = 0;
  };

  struct NameEntry {
    const char* pointer = nullptr;
    const std::string* text = nullptr;
    uint32_t id = 0;
  };
  struct ContextEntry {
    Context context;
    uint32_t id = 0;
    bool is_known = false;
  };
  struct InnerEntry {
    uint32_t outside = ~0u;
    uint32_t inner = 0;
    uint32_t id = 0;
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };

  TraceWriter& writer_;
  Table<InnerEntry> inner_;
  Table<NameEntry> by_pointer_;
  Table<ContextEntry> contexts_;
  std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>> names_;
};

}  // namespace oomdiag
