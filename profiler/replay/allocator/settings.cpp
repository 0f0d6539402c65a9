#include "profiler/replay/allocator/settings.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <optional>
#include <string>

#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

std::optional<int64_t> parse_integer(std::string_view text) {
  const std::optional<int64_t> value = parse_whole_number(text);
  return value && *value >= 0 ? value : std::nullopt;
}

std::optional<int64_t> parse_megabytes(std::string_view text) {
  const auto value = parse_integer(text);
  if (!value || *value > (int64_t{1} << 40)) return std::nullopt;
  return *value * kMiB;
}

double parse_fraction(std::string_view text) {
  double value = 1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && value > 0 && value <= 1 ? value : 1;
}

/// Takes the text up to the next `separator` that is not inside brackets off the front of `text`.
std::string_view take_until(std::string_view& text, char separator) {
  int depth = 0;
  size_t end = 0;
  for (; end < text.size() && (depth > 0 || text[end] != separator); ++end) {
    if (text[end] == '[') ++depth;
    if (text[end] == ']') --depth;
  }
  const std::string_view head = text.substr(0, end);
  text.remove_prefix(std::min(text.size(), end + 1));
  return head;
}

/// `N`, or a list `[256:1,512:2,>:8]` whose keys are megabytes. What lies below the first key takes the first value,
/// `>` everything above the last key (AcceleratorAllocatorConfig::parseRoundUpPower2Divisions).
void parse_divisions(std::string_view text, std::array<int64_t, 16>& divisions) {
  if (!text.starts_with('[')) {
    divisions.fill(parse_integer(text).value_or(0));
    return;
  }
  text = text.substr(1, text.find(']') - 1);
  bool first = true;
  size_t last = 0;
  while (!text.empty()) {
    std::string_view pair = take_until(text, ',');
    const std::string_view key = take_until(pair, ':');
    const int64_t value = parse_integer(pair).value_or(0);
    if (key == ">") {
      std::fill(divisions.begin() + static_cast<std::ptrdiff_t>(std::min(last + 1, divisions.size())), divisions.end(),
                value);
      continue;
    }
    const auto megabytes = static_cast<uint64_t>(std::max<int64_t>(parse_integer(key).value_or(1), 1));
    last = std::min<size_t>(static_cast<size_t>(std::bit_width(megabytes)) - 1, divisions.size() - 1);
    if (first) std::fill_n(divisions.begin(), last, value);
    divisions[last] = value;
    first = false;
  }
}

}  // namespace

int64_t allowed_bytes(int64_t total_bytes, double memory_fraction) {
  return memory_fraction < 1 ? static_cast<int64_t>(memory_fraction * static_cast<double>(total_bytes)) : total_bytes;
}

int64_t available_bytes(int64_t total_bytes, int64_t non_pytorch_bytes, double memory_fraction) {
  return std::min(total_bytes - non_pytorch_bytes, allowed_bytes(total_bytes, memory_fraction));
}

AllocatorSettings parse_allocator_settings(std::string_view text) {
  std::string compact(text);
  std::erase_if(compact, [](char c) { return c == ' ' || c == '\t'; });
  std::string_view rest = compact;

  AllocatorSettings settings;
  while (!rest.empty()) {
    std::string_view value = take_until(rest, ',');
    const std::string_view key = take_until(value, ':');
    if (key == "expandable_segments") settings.expandable_segments = value == "True";
    if (key == "max_split_size_mb")
      settings.max_split_bytes = parse_megabytes(value).value_or(settings.max_split_bytes);
    if (key == "large_segment_size_mb") {
      settings.large_segment_bytes = parse_megabytes(value).value_or(settings.large_segment_bytes);
    }
    if (key == "per_process_memory_fraction") settings.memory_fraction = parse_fraction(value);
    if (key == "roundup_power2_divisions") parse_divisions(value, settings.roundup_power2_divisions);
  }
  return settings;
}

}  // namespace oomdiag
