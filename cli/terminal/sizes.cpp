#include "cli/terminal/sizes.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

#include "profiler/error.h"

namespace oomdiag {
namespace {

constexpr double kLeastWithoutUnit = 1024;              // what is less was meant in another unit
constexpr double kLargestSize = 1152921504606846976.0;  // 2^60

std::optional<double> unit_bytes(std::string_view unit) {
  constexpr std::array<std::pair<std::string_view, double>, 14> kUnits{{{"", 1},
                                                                        {"b", 1},
                                                                        {"k", 0x1p10},
                                                                        {"kb", 1e3},
                                                                        {"kib", 0x1p10},
                                                                        {"m", 0x1p20},
                                                                        {"mb", 1e6},
                                                                        {"mib", 0x1p20},
                                                                        {"g", 0x1p30},
                                                                        {"gb", 1e9},
                                                                        {"gib", 0x1p30},
                                                                        {"t", 0x1p40},
                                                                        {"tb", 1e12},
                                                                        {"tib", 0x1p40}}};
  std::string lower;
  for (const char letter : unit) {
    if (letter != ' ') lower += static_cast<char>(letter >= 'A' && letter <= 'Z' ? letter - 'A' + 'a' : letter);
  }
  for (const auto& [name, bytes] : kUnits) {
    if (lower == name) return bytes;
  }
  return std::nullopt;
}

}  // namespace

int64_t parse_bytes(std::string_view text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  const std::optional<double> unit = unit_bytes({rest, static_cast<std::size_t>(end - rest)});
  const double bytes = std::floor(number * unit.value_or(0));
  if (error != std::errc{} || !unit || !(bytes >= 1) || bytes > kLargestSize) {
    throw Error(ErrorKind::usage, fmt::format("'{}' is not an amount of memory", text),
                "write it as 8GiB, 8192MiB, 8.5GB or a number of bytes");
  }
  const bool has_unit = rest != end;
  if (!has_unit && bytes < kLeastWithoutUnit) {
    throw Error(ErrorKind::usage,
                fmt::format("'{}' is {} byte{}: its unit is missing", text, text, bytes == 1 ? "" : "s"),
                fmt::format("did you mean {0}GiB or {0}MiB? {0}B takes it as it is", text));
  }
  return static_cast<int64_t>(bytes);
}

std::string to_gib(std::optional<int64_t> bytes) {
  return bytes ? fmt::format("{:.2f}", static_cast<double>(*bytes) / 0x1p30) : "-";
}

}  // namespace oomdiag
