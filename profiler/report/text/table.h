#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace oomdiag {

/// A bar of at most 20 characters.
std::string bar(int64_t part, int64_t whole, bool unicode);

/// `sentence` in lines of at most `columns`, indented and cut between words; safe for a terminal.
std::string wrapped(std::string_view sentence, size_t columns);

/// "saved for backward" of "saved_for_backward".
std::string in_words(std::string name);

/// `text`, filled up with spaces to `columns`; characters are counted, not bytes.
std::string padded(std::string_view text, size_t columns);

}  // namespace oomdiag
