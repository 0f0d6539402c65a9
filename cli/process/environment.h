#pragma once

#include <filesystem>
#include <string>

// Our own environment, and texts for that of others.
namespace oomdiag {

/// The value of a variable; empty where it is not set.
std::string environment(const char* name);

/// PYTHONPATH with `folder` before what it holds.
std::string before_python_path(const std::filesystem::path& folder);

/// As one word for a shell: where it must be, in single quotes, which themselves are put outside of them.
std::string quoted_for_shell(const std::string& text);

}  // namespace oomdiag
