#include "cli/process/environment.h"

#include <cstdlib>

namespace oomdiag {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string before_python_path(const std::filesystem::path& folder) {
  const std::string before = environment("PYTHONPATH");
  return before.empty() ? folder.string() : folder.string() + ":" + before;
}

std::string quoted_for_shell(const std::string& text) {
  std::string result = "'";
  for (const char letter : text) result += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return result + "'";
}

}  // namespace oomdiag
