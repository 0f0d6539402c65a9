#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace oomdiag {

/// "11.75" of bytes, in GiB; "-" where there is no figure.
std::string figure(const std::optional<int64_t>& bytes);

/// "556", of less than 100 ms "55.6"; "-" where there is no time.
std::string milliseconds(const std::optional<int64_t>& ns);

}  // namespace oomdiag
