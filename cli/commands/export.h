#pragma once

#include <filesystem>

#include "cli/reports/reports.h"

namespace oomdiag {

/// Writes the page on this: whole or not at all. Throws Error(environment).
void write_page(const Explained& from, const std::filesystem::path& file);

/// Without paths, the command line and names of users.
void redact(Explained& from);

/// Opens a file as the desktop does it. False where there is none.
bool open_on_desktop(const std::filesystem::path& file);

}  // namespace oomdiag
