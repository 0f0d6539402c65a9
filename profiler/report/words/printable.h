#pragma once

#include <string>
#include <string_view>

// Names come from programs, files and other processes. What a terminal would obey in them (control characters of ASCII and of
// the upper half, marks that turn the direction of writing) and bytes that are no UTF-8 never reach one.
namespace oomdiag {

/// How many characters `text` has; bytes that continue one do not count.
size_t count_columns(std::string_view text);

/// On one line: control characters and line ends replaced, at most `columns` wide (cut in the middle).
std::string printable(std::string_view text, size_t columns);
/// The same, but keeps the end, which says most of a module's path: "...3.5.conv2".
std::string printable_end(std::string_view text, size_t columns);
/// A text of several lines, as it is to be printed: line ends stay. Without `unicode` nothing but ASCII is left.
std::string printable_lines(std::string_view text, bool unicode = true);

/// The same JSON; what a terminal would obey in its strings is written "\u009b".
std::string escape_controls(std::string json);

}  // namespace oomdiag
