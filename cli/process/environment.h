#pragma once

#include <filesystem>
#include <string>
#include <vector>

// Our own environment, and texts for that of others.
namespace oomdiag {

/// The value of a variable; empty where it is not set.
std::string environment(const char* name);

/// PYTHONPATH with `folder` before what it holds.
std::string before_python_path(const std::filesystem::path& folder);

/// As one word for a shell: where it must be, in single quotes, which themselves are put outside of them.
std::string quoted_for_shell(const std::string& text);

/// "run -- python 'train it.py'": the words as a line of a shell.
std::string line_for_shell(const std::vector<std::string>& words);

}  // namespace oomdiag
