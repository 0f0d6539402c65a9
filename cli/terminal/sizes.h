#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace oomdiag {

/// Bytes of "8GiB", "8GB", "8192MiB", "11.75 GiB" or "8589934592"; a single K, M, G or T is binary, as in "8G".
/// Throws Error(usage) for anything else, for what is above 2^60, and for a number below 1024 that has no unit.
int64_t parse_bytes(std::string_view text);

/// "11.75", in GiB; "-" where there is no figure.
std::string to_gib(std::optional<int64_t> bytes);

}  // namespace oomdiag
