#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "extension/record/cache_table.h"
#include "profiler/event.h"
#include "profiler/trace/writer.h"

namespace oomdiag {

/// Remembers the ids of names and contexts that a thread has seen, also of those that did not fit, so that the common
/// case locks nothing. Starts small, since many threads see few, and never outgrows some hundred KiB. One thread.
class InternCache {
 public:
  explicit InternCache(TraceWriter& writer) : writer_(writer) {}

  /// The id of a name, which need not outlive the call.
  uint32_t name(std::string_view name);
  struct Node {
    uint32_t name;
    uint32_t context;  ///< of the node and nothing else
  };
  Node node(std::string_view name);
  uint32_t context(const Context& context);
  /// The id of `inside`, which is the context `outside` with another inner op: the commonest step, at half the price.
  uint32_t inner_context(uint32_t outside, const Context& inside);

 private:
  static constexpr uint32_t kUnknown = ~0u;
  // One line of the processor's cache is all that may be looked at. So a name's text is in its entry; longer ones are not in
  // the table.
  struct alignas(64) NameEntry {
    uint32_t id = 0;
    uint32_t of_node = kUnknown;
    uint8_t length = 0;
    char text[55] = "";
  };
  static_assert(sizeof(NameEntry) == 64);
  struct alignas(64) ContextEntry {
    Context context;
    uint32_t id = 0;
  };
  struct InnerEntry {
    uint32_t outside = 0;
    uint32_t inner = 0;
    uint32_t id = 0;
  };
  NameEntry* find(std::string_view text);
  uint32_t look_up(std::string_view text);

  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };

  TraceWriter& writer_;
  CacheTable<InnerEntry> inner_;
  CacheTable<NameEntry> by_text_;
  CacheTable<ContextEntry> contexts_;
  std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>> names_;
};

}  // namespace oomdiag
