#include "extension/record/intern_cache.h"

#include <cstring>

namespace oomdiag {
namespace {

constexpr size_t kMostNames = 1 << 14;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

}  // namespace

// Ops have names that stay where they are; those of nodes and scopes are temporary, so the text is compared always.
uint32_t InternCache::name(const char* text) {
  const uint64_t hash = (reinterpret_cast<uintptr_t>(text) >> 4) * kGolden;
  NameEntry& entry = by_pointer_.at(hash);
  if (entry.pointer == text && std::strcmp(entry.text->c_str(), text) == 0) return entry.id;
  const bool evicts = entry.pointer != nullptr;
  const uint32_t id = name(std::string_view(text));  // may forget all entries
  if (evicts) by_pointer_.grows();
  by_pointer_.at(hash) = {text, &names_.find(std::string_view(text))->first, id};
  return id;
}

uint32_t InternCache::name(std::string_view text) {
  const auto known = names_.find(text);
  if (known != names_.end()) return known->second;
  const uint32_t id = writer_.intern(text);
  if (names_.size() >= kMostNames) {
    by_pointer_ = {};  // its texts are those of names_
    names_.clear();
  }
  names_.emplace(text, id);
  return id;
}

uint32_t InternCache::context(const Context& context) {
  if (context == Context{}) return 0;
  uint64_t words[4];
  static_assert(sizeof words == sizeof(Context));
  std::memcpy(words, &context, sizeof words);
  uint64_t hash = words[0] * kGolden;
  for (int i = 1; i < 4; ++i) hash = (hash ^ words[i] ^ hash >> 29) * kGolden;
  const ContextEntry& entry = contexts_.at(hash);
  if (entry.is_known && entry.context == context) return entry.id;
  if (entry.is_known) contexts_.grows();
  const uint32_t id = writer_.intern(context);
  contexts_.at(hash) = {context, id, true};
  return id;
}

uint32_t InternCache::inner_context(uint32_t outside, const Context& inside) {
  const uint64_t hash = (uint64_t{outside} << 32 | inside.inner) * kGolden;
  const InnerEntry& entry = inner_.at(hash);
  if (entry.outside == outside && entry.inner == inside.inner) return entry.id;
  const bool evicts = entry.outside != ~0u;
  const uint32_t id = context(inside);
  if (evicts) inner_.grows();
  inner_.at(hash) = {outside, inside.inner, id};
  return id;
}

}  // namespace oomdiag
