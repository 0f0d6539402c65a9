#include "profiler/explain/words/bytes_text.h"

#include <fmt/format.h>

#include "profiler/replay/allocator/settings.h"

namespace oomdiag {

Unit unit_for(int64_t largest_bytes) {
  if (largest_bytes >= kGiB) return {"GiB", kGiB};
  if (largest_bytes >= kMiB) return {"MiB", kMiB};
  if (largest_bytes >= kKiB) return {"KiB", kKiB};
  return {};
}

std::string in_unit(int64_t bytes, const Unit& unit) {
  if (unit.bytes == 1) return fmt::format("{}", bytes);
  return fmt::format("{:.2f}", static_cast<double>(bytes) / static_cast<double>(unit.bytes));
}

bool reads_as_zero(int64_t bytes, const Unit& unit) { return bytes < (unit.bytes + 199) / 200; }

std::string with_unit(int64_t bytes) {
  const Unit unit = unit_for(bytes);
  return fmt::format("{} {}", in_unit(bytes, unit), unit.name);
}

}  // namespace oomdiag
