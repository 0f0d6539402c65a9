#include "extension/record/intern_cache.h"

#include <cstring>

#include "profiler/event.h"
#include "profiler/trace/mix.h"

namespace oomdiag {
namespace {

constexpr size_t kMaxNames = 1 << 14;

/// Of the first and the last eight letters: names of nodes begin in their own ways, those of layers end so.
uint64_t hash_of(std::string_view text) {
  uint64_t ends[2] = {};
  if (text.size() >= sizeof *ends) {
    std::memcpy(ends, text.data(), sizeof *ends);
    std::memcpy(ends + 1, text.data() + text.size() - sizeof *ends, sizeof *ends);
  } else {
    for (const char letter : text) *ends = *ends << 8 | static_cast<unsigned char>(letter);
  }
  return mix(mix(mix(text.size(), ends[0]), ends[1]), 0);
}

}  // namespace

InternCache::NameEntry* InternCache::find(std::string_view text) {
  if (text.size() > sizeof NameEntry::text) return nullptr;
  const uint64_t hash = hash_of(text);
  const auto is_it = [text](const NameEntry& entry) { return std::string_view(entry.text, entry.length) == text; };
  if (NameEntry* const known = by_text_.find(hash, is_it)) return known;
  NameEntry entry{.id = look_up(text), .length = static_cast<uint8_t>(text.size())};
  text.copy(entry.text, text.size());
  return &by_text_.add(hash, entry);
}

uint32_t InternCache::look_up(std::string_view text) {
  const auto known = names_.find(text);
  if (known != names_.end()) return known->second;
  if (names_.size() >= kMaxNames) names_.clear();
  return names_.emplace(text, writer_.intern(text)).first->second;
}

uint32_t InternCache::name(std::string_view text) {
  const NameEntry* const entry = find(text);
  return entry != nullptr ? entry->id : look_up(text);
}

InternCache::Node InternCache::node(std::string_view name) {
  NameEntry* const entry = find(name);
  if (entry != nullptr && entry->of_node != kUnknown) return {entry->id, entry->of_node};
  const uint32_t id = entry != nullptr ? entry->id : look_up(name);
  const uint32_t of_node = context({.node = id});
  if (entry != nullptr) entry->of_node = of_node;
  return {id, of_node};
}

uint32_t InternCache::context(const Context& context) {
  if (context == Context{}) return 0;
  uint64_t words[4];
  static_assert(sizeof words == sizeof(Context));
  std::memcpy(words, &context, sizeof words);
  uint64_t hash = spread(words[0]);
  for (int i = 1; i < 4; ++i) hash = spread(hash ^ words[i] ^ hash >> 29);
  const auto is_it = [&](const ContextEntry& entry) { return std::memcmp(&entry.context, words, sizeof words) == 0; };
  if (const ContextEntry* const known = contexts_.find(hash, is_it)) return known->id;
  const uint32_t id = writer_.intern(context);
  contexts_.add(hash, {context, id});
  return id;
}

uint32_t InternCache::inner_context(uint32_t outside, const Context& inside) {
  if (outside == 0) return context(inside);  // it is that of all places that did not fit
  const uint64_t hash = spread(uint64_t{outside} << 32 | inside.inner);
  const auto is_it = [&](const InnerEntry& entry) { return entry.outside == outside && entry.inner == inside.inner; };
  if (const InnerEntry* const known = inner_.find(hash, is_it)) return known->id;
  const uint32_t id = context(inside);
  inner_.add(hash, {outside, inside.inner, id});
  return id;
}

}  // namespace oomdiag
