#pragma once

#include <cstddef>
#include <string>

#include "cli/terminal/terminal.h"

namespace oomdiag {

/// A report as it is shown on a terminal: the headline bold, red where memory ran out; "yes" green and "no" red where they end a
/// row; rows of tables closer where the terminal is narrower than they are. Unchanged where the output is no terminal.
std::string terminal_text(const std::string& text, const OutputCapabilities& capabilities);

/// `text` for `columns` columns: a table that is too wide loses its bars first, then blanks, each row equally many, so that figures
/// stay below each other. What is too long by itself stays.
std::string narrowed(const std::string& text, std::size_t columns);

}  // namespace oomdiag
