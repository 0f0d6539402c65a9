#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace oomdiag {

/// The one unit of a table: the largest that its largest figure fills.
struct Unit {
  std::string_view name = "B";
  int64_t bytes = 1;
};
Unit unit_for(int64_t largest_bytes);

/// `bytes` in `unit`, two decimals; bytes are whole.
std::string in_unit(int64_t bytes, const Unit& unit);

/// Less than half a hundredth of the unit: it would read 0.00.
bool reads_as_zero(int64_t bytes, const Unit& unit);

/// As `in_unit`, with the unit behind it, chosen for this figure alone: "0.83 GiB".
std::string with_unit(int64_t bytes);

}  // namespace oomdiag
