#include "profiler/trace/interner.h"

#include <cstring>

#include "profiler/event.h"
#include "profiler/trace/format.h"
#include "profiler/trace/shared_file.h"

namespace oomdiag {
namespace {

/// The beginning of a name in UTF-8, of at most so many bytes, that ends where a character does.
std::string_view cut(std::string_view name, size_t most) {
  if (name.size() <= most) return name;
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; };
  while (most > 0 && continues(name[most])) --most;
  return name.substr(0, most);
}

}  // namespace

size_t Interner::ContextHash::operator()(const Context& context) const noexcept {
  return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&context), sizeof context});
}

Interner::Interner(SharedFile& file, TraceHeader& header)
    : file_(file),
      header_(header),
      name_section_{header.names_offset, header.names_bytes},
      context_section_{header.contexts_offset, header.contexts_capacity * sizeof(Context)} {
  intern(std::string_view{});
  intern(Context{});
}

uint32_t Interner::intern(std::string_view name) {
  name = cut(name, 4096);
  const std::lock_guard lock(mutex_);
  const auto [entry, fresh] = names_.try_emplace(std::string(name), static_cast<uint32_t>(names_.size()));
  if (!fresh || append(name)) return entry->second;
  names_.erase(entry);
  header_.dropped_names.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

uint32_t Interner::intern(const Context& context) {
  const std::lock_guard lock(mutex_);
  const auto [entry, fresh] = contexts_.try_emplace(context, static_cast<uint32_t>(contexts_.size()));
  if (!fresh || append(context, entry->second)) return entry->second;
  contexts_.erase(entry);
  header_.dropped_names.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

// Record: 4 bytes of length, then the bytes. The index of a name is its place in the order of records.
bool Interner::append(std::string_view name) {
  const uint64_t used = header_.names_used.load(std::memory_order_relaxed);
  const uint64_t end = used + sizeof(uint32_t) + name.size();
  if (end > name_section_.bytes || name_section_.reserve_up_to(file_, end) != DiskSpace::enough) return false;
  char* at = file_.at(name_section_.offset + used);
  const auto length = static_cast<uint32_t>(name.size());
  std::memcpy(at, &length, sizeof length);
  if (length != 0) std::memcpy(at + sizeof length, name.data(), length);
  header_.names_used.store(end, std::memory_order_release);
  return true;
}

bool Interner::append(const Context& context, uint32_t index) {
  const uint64_t end = (uint64_t{index} + 1) * sizeof context;
  if (end > context_section_.bytes || context_section_.reserve_up_to(file_, end) != DiskSpace::enough) return false;
  std::memcpy(file_.at(context_section_.offset + end - sizeof context), &context, sizeof context);
  header_.context_count.store(index + 1, std::memory_order_release);
  return true;
}

}  // namespace oomdiag
