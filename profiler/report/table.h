#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "profiler/report/printable.h"

namespace oomdiag {

/// The one unit of a table: the largest that its largest figure fills.
struct Unit {
  std::string_view name = "B";
  int64_t bytes = 1;
};
Unit unit_for(int64_t largest_bytes);
/// `bytes` in `unit`, two decimals; bytes are whole.
std::string in_unit(int64_t bytes, const Unit& unit);
/// The same with the unit behind it, chosen for this figure alone: "0.83 GiB".
std::string with_unit(int64_t bytes);

/// A bar of at most 20 characters.
std::string bar(int64_t part, int64_t whole, bool unicode);

/// `sentence` in lines of at most `columns`, indented and cut between words; safe for a terminal.
std::string wrapped(std::string_view sentence, size_t columns);

/// "saved for backward" of "saved_for_backward".
std::string in_words(std::string name);

/// `text`, filled up with spaces to `columns`; characters are counted, not bytes.
std::string padded(std::string_view text, size_t columns);

}  // namespace oomdiag
