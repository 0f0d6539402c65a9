#pragma once

#include <filesystem>

namespace oomdiag {

/// Writes the page on a run, given its folder: whole or not at all. Throws Error(input or environment).
void write_page(const std::filesystem::path& run, const std::filesystem::path& file);

/// Opens a file as the desktop does it. False where there is none.
bool open_on_desktop(const std::filesystem::path& file);

}  // namespace oomdiag
